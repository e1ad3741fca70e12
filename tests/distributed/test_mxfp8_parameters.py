"""What an MXFP8 parameter is to its model, which parameters are, and what mistakes end in."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import sshsdp
from sshsdp.parameters.quantized import QuantizedParameter
from sshsdp.spaces.mxfp8_side import BlockSide
from tests.support.compare import assert_within, relative_error
from tests.support.multiples import Mixture, Odd
from tests.support.training import Recipe, shard, subject_of
from tests.support.zoo import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable


def policy(**options: Any) -> sshsdp.RuntimePolicy:
    return sshsdp.RuntimePolicy(**{"dtype": torch.float32, "format": "mxfp8", **options})


def quantized_names(engine: sshsdp.Engine) -> set[str]:
    return {
        slot.name
        for space in engine.spaces
        if isinstance(space.runtime, BlockSide)
        for slot in space.slots
    }


# Which parameters


def default_choice(kind: type[nn.Module], options: dict[str, Any]) -> list[str]:
    engine = sshsdp.shard(kind(), runtime=policy(**options))
    found = sorted(quantized_names(engine))
    engine.close()
    return found


def mixture() -> nn.Module:
    return Mixture(True)


def test_linear_layers_of_blocks_with_sides_of_32_are_taken(
    workers: Callable[[int], Any],
) -> None:
    found = workers(1).run(default_choice, Odd, {})[0]
    kinds = ("down.weight", "high.weight", "low.weight", "up.weight")
    assert found == [f"blocks.{index}.{kind}" for index in range(3) for kind in kinds]


def test_experts_are_taken_and_their_router_is_not(workers: Callable[[int], Any]) -> None:
    found = workers(1).run(default_choice, mixture, {})[0]
    assert found == [f"blocks.{i}.1.{kind}" for i in range(2) for kind in ("down", "up")]


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ({"*": sshsdp.DenseFormat(torch.float32)}, 0),
        ({"blocks.0.*": sshsdp.DenseFormat(torch.float32)}, 8),
        ({"blocks.0.up.weight": sshsdp.DenseFormat(torch.bfloat16)}, 11),
        ({"*.up.*": sshsdp.MXFP8Format(), "*": sshsdp.DenseFormat(torch.float32)}, 3),
        ({"blocks.*": sshsdp.MXFP8Format()}, 12),
    ],
    ids=["all dense", "one block dense", "one weight dense", "only some", "norms are left out"],
)
def test_patterns_come_before_the_default(
    workers: Callable[[int], Any], formats: Any, expected: int
) -> None:
    assert len(workers(1).run(default_choice, Odd, {"formats": formats})[0]) == expected


def test_a_pattern_reaches_the_root_unit_too(workers: Callable[[int], Any]) -> None:
    formats = {"head.weight": sshsdp.MXFP8Format()}
    assert workers(2).run(head_in_mxfp8, formats)[0] == ["head.weight"]


def head_in_mxfp8(formats: Any) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.body = nn.ModuleList([nn.Linear(32, 32)])
    model.head = nn.Linear(32, 64)
    model.forward = lambda x: model.head(model.body[0](x))  # type: ignore[method-assign]
    engine = sshsdp.shard(model, runtime=policy(format=None, formats=formats))
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(3, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sorted(quantized_names(engine))


def refused(formats: Any, options: dict[str, Any]) -> str:
    try:
        sshsdp.shard(Odd(), runtime=policy(formats=formats, **options))
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("blocks.0.norm.weight", "1-D"),
        ("blocks.0.dense.weight", "multiples of 32"),
        ("embedding.weight", "multiples of 32"),
    ],
)
def test_a_name_that_cannot_be_in_mxfp8_is_an_error(
    workers: Callable[[int], Any], name: str, why: str
) -> None:
    message = workers(1).run(refused, {name: sshsdp.MXFP8Format()}, {})[0]
    assert name in message
    assert why in message
    assert "DenseFormat" in message


def test_a_named_pack_must_share_its_format(workers: Callable[[int], Any]) -> None:
    formats = {"blocks.*.low.weight": sshsdp.DenseFormat(torch.float32)}
    packs = (sshsdp.Pack(("up.weight", "low.weight")),)
    message = workers(1).run(
        refused, {"blocks.0.up.weight": sshsdp.MXFP8Format(), **formats}, {"packs": packs}
    )[0]
    assert "one runtime format" in message
    assert "blocks.0.up.weight" in message


def pack_choice(dense: str) -> tuple[list[str], str]:
    from sshsdp.engine.build import logger

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine = sshsdp.shard(
            Odd(),
            runtime=policy(
                packs=(sshsdp.Pack(("up.weight", "low.weight")),),
                formats={dense: sshsdp.DenseFormat(torch.float32)},
            ),
        )
    finally:
        logger.removeHandler(handler)
    found = sorted(quantized_names(engine))
    engine.close()
    return found, "\n".join(lines)


def test_a_pack_with_a_dense_member_is_dense_and_the_table_says_why(
    workers: Callable[[int], Any],
) -> None:
    found, table = workers(1).run(pack_choice, "*.low.*")[0]
    assert not any("up.weight" in name or "low.weight" in name for name in found)
    line = next(line for line in table.splitlines() if line.startswith("blocks.*.up.weight x 3"))
    assert "float32" in line
    assert "packed with 'blocks.*.low.weight', which is dense" in line
    assert any(
        line.startswith("blocks.*.high.weight x 3") and "mxfp8" in line
        for line in table.splitlines()
    )
    assert "in the root unit" in table or "multiples of 32" in table


def test_policies_refuse_what_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="format must be None, 'mxfp8'"):
        sshsdp.RuntimePolicy(format="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bfloat16, float32 or float64"):
        sshsdp.RuntimePolicy(format="mxfp8", dtype=torch.float16)
    with pytest.raises(TypeError, match="must be a runtime format"):
        sshsdp.RuntimePolicy(formats={"*": "mxfp8"})  # type: ignore[dict-item]


# What a parameter is


class Reader(nn.Module):
    """A block that does something with its weight; the operation comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64)
        self.operation: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.operation is not None:
            return self.operation(self.linear.weight, x)
        return self.linear(x)


class Readers(nn.Module):
    """One such block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reader()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


OPERATIONS: dict[str, Any] = {
    "sum": lambda weight, x: weight.sum(),
    "addition": lambda weight, x: weight + 1,
    "chunk": lambda weight, x: weight.chunk(2),
    "detach": lambda weight, x: weight.detach(),
    "data": lambda weight, x: weight.data,
    "a product from the left": lambda weight, x: weight @ x.T,
    "a product with the matrix as it is": lambda weight, x: torch.ones(3, 64) @ weight,
    "index": lambda weight, x: weight[0],
    "numpy": lambda weight, x: weight.numpy(),
    "copy": lambda weight, x: copy.deepcopy(weight),
    "conv": lambda weight, x: functional.conv1d(x, weight),
    "a view's value": lambda weight, x: weight.T.sum(),
}


def message_of(name: str) -> str:
    model = Readers()
    sshsdp.shard(model, runtime=policy())
    model.blocks[0].operation = OPERATIONS[name]
    try:
        model(torch.ones(3, 32))
    except (RuntimeError, AttributeError) as error:
        return str(error)
    return "it was allowed"


@pytest.mark.parametrize("name", OPERATIONS)
def test_reading_it_in_forward_says_what_to_do(workers: Callable[[int], Any], name: str) -> None:
    message = workers(1).run(message_of, name)[0]
    assert "'blocks.0.linear.weight' is in MXFP8" in message
    assert "dequantize()" in message
    assert "sshsdp.DenseFormat()" in message


def check_metadata() -> None:
    model = Readers()
    weight = model.blocks[0].linear.weight
    engine = sshsdp.shard(model, runtime=policy(dtype=torch.bfloat16))
    seen = []

    def look(parameter: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(
            (
                parameter is weight,
                tuple(parameter.shape),
                parameter.dtype,
                parameter.ndim,
                repr(parameter),
            )
        )
        assert isinstance(parameter, QuantizedParameter)
        assert torch.empty_like(parameter).shape == (64, 32)
        assert parameter.to(torch.bfloat16) is parameter
        assert parameter.T.shape == (32, 64)
        assert parameter.mT.mT.size(0) == 64
        return functional.linear(x, parameter)

    model.blocks[0].operation = look
    with torch.no_grad():
        model(torch.ones(3, 32))
    same, shape, dtype, ndim, text = seen[0]
    assert same
    assert (shape, dtype, ndim) == ((64, 32), torch.bfloat16, 2)
    assert "blocks.0.linear.weight" in text
    assert not isinstance(weight, QuantizedParameter)
    assert engine.units[1].gathered_bytes == 0


def test_it_has_the_name_shape_and_dtype_of_the_models_parameter(
    workers: Callable[[int], Any],
) -> None:
    workers(2).run(check_metadata)


def same_product(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ways: dict[str, Any] = {
        "matmul": lambda weight, x: x @ weight.T,
        "mm": lambda weight, x: torch.mm(x, weight.t()),
        "transpose": lambda weight, x: torch.matmul(x, weight.transpose(0, 1)),
        "functional": lambda weight, x: functional.linear(x, weight),
        "dequantized": lambda weight, x: x @ weight.dequantize().T,
        "float": lambda weight, x: functional.linear(x, weight.double().float()),
    }
    torch.manual_seed(0)
    results = []
    for way in (None, ways[name]):
        torch.manual_seed(0)
        model = Readers()
        nn.init.zeros_(model.blocks[0].linear.bias)
        engine = sshsdp.shard(model, runtime=policy())
        optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=1.0))
        model.blocks[0].operation = way
        output = model(torch.randn(3, 32))
        output.square().sum().backward()
        optimizer.step()
        results.append(
            [output.detach(), engine.full_state_dict(rank0_only=False)["blocks.0.linear.weight"]]
        )
        engine.close()
    return results[0], results[1]


@pytest.mark.parametrize("name", ["matmul", "mm", "transpose", "functional"])
def test_products_written_otherwise_are_the_linear_layers(
    workers: Callable[[int], Any], name: str
) -> None:
    for expected, actual in zip(*workers(2).run(same_product, name)[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["dequantized", "float"])
def test_dequantized_values_pass_their_gradient_on(
    workers: Callable[[int], Any], name: str
) -> None:
    """The activations and gradients are not rounded then, which moves each by 2**-4 at most."""
    for expected, actual in zip(*workers(2).run(same_product, name)[0], strict=True):
        assert not torch.equal(actual, expected)
        assert_within(relative_error(actual, expected), 2 * 2.0**-4)


def compared_with_reference(mesh: Any) -> None:
    from tests.support.mxfp8_reference import rounded

    model, engine, _ = shard(Recipe(subject="odd multiples", mxfp8=True, mesh=mesh))
    masters = engine.full_state_dict(rank0_only=False)
    with engine.unsharded():
        for name, parameter in model.named_parameters():
            shown = parameter.float() if isinstance(parameter, QuantizedParameter) else parameter
            expected = masters[name]
            if isinstance(parameter, QuantizedParameter):
                expected = rounded(expected, -1)
                assert torch.equal(parameter.dequantize(), expected)
            assert torch.equal(shown, expected)
    quantized = quantized_names(engine)
    assert len(quantized) == 12
    with engine.unsharded(writes=True):
        for name, parameter in model.named_parameters():
            if name in quantized:
                assert not isinstance(parameter, QuantizedParameter)
                assert torch.equal(parameter, rounded(masters[name], -1))
    after = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[name], masters[name]) for name in masters), "no write, no change"
    with engine.unsharded(writes=True), torch.no_grad():
        model.blocks[1].up.weight[3].fill_(2.0)
    after = engine.full_state_dict(rank0_only=False)
    changed = after["blocks.1.up.weight"]
    assert torch.equal(changed[3], torch.full_like(changed[3], 2.0))
    assert torch.equal(changed[4:], masters["blocks.1.up.weight"][4:])
    with engine.unsharded():
        shown = model.blocks[1].up.weight.float()
        assert torch.equal(shown, rounded(changed, -1))
    engine.close()
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, after[name])


@pytest.mark.parametrize("mesh", [None, (2, 1), (2, 2)], ids=str)
def test_unsharded_shows_runtime_values_and_takes_dense_ones(
    workers: Callable[[int], Any], mesh: Any
) -> None:
    workers(2 if mesh is None else mesh[0] * mesh[1]).run(compared_with_reference, mesh)


def generated() -> bool:
    recipe = Recipe(subject="llama of 64", mxfp8=True)
    model, engine, _ = shard(recipe)
    prompt = torch.arange(4)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    with engine.unsharded():
        inside = model.generate(prompt, **options)
    with torch.no_grad():
        outside = model(inside[:, :-1]).logits.argmax(-1)
    engine.close()
    return torch.equal(outside[:, 3:], inside[:, 4:])


def test_generating_uses_the_blocks(workers: Callable[[int], Any]) -> None:
    assert all(workers(2).run(generated))


# Transformers' mixtures, autocast, low-rank adapters


def train_mixtral(implementation: str, mxfp8: bool) -> tuple[list[float], list[str]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=31,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
        use_cache=False,
    )
    config._experts_implementation = implementation
    model = MixtralForCausalLM(config)
    engine = sshsdp.shard(model, runtime=policy(format="mxfp8" if mxfp8 else None))
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step % 2)
        tokens = torch.randint(0, 31, (2, 8), generator=generator)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sorted(quantized_names(engine))


def test_transformers_mixtures_train_grouped_and_one_by_one(
    workers: Callable[[int], Any],
) -> None:
    grouped, names = workers(2).run(train_mixtral, "grouped_mm", True)[0]
    eager, _ = workers(2).run(train_mixtral, "eager", True)[0]
    dense, _ = workers(2).run(train_mixtral, "grouped_mm", False)[0]
    assert any("experts.gate_up_proj" in name for name in names)
    assert not any("gate.weight" in name for name in names)
    assert grouped == pytest.approx(eager, rel=1e-5)
    assert grouped == pytest.approx(dense, rel=0.02)
    assert grouped != dense


def under_autocast() -> tuple[torch.dtype, list[torch.dtype]]:
    model, engine, optimizer = shard(Recipe(subject="decoder of 64", mxfp8=True))
    subject = subject_of(Recipe(subject="decoder of 64"))
    tokens = subject.micro_batch(0, 0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        output = model.blocks[0].up(torch.randn(2, 64))
        loss = subject.loss(model, tokens)
    loss.backward()
    grads = [u.grad.dtype for _, u in engine.update_parameters() if u.grad is not None]
    optimizer.step()
    return output.dtype, grads


def test_autocast_decides_the_dtype_of_outputs(workers: Callable[[int], Any]) -> None:
    dtype, grads = workers(2).run(under_autocast)[0]
    assert dtype == torch.bfloat16
    assert grads
    assert set(grads) == {torch.float32}


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.Linear(width, 32, bias=False)
        self.lora_B = nn.Linear(32, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.lora_B(self.lora_A(x))


class AdaptedModel(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_adapter() -> dict[str, Any]:
    torch.manual_seed(0)
    model = AdaptedModel()
    engine = sshsdp.shard(model, runtime=policy())
    optimizer = engine.attach(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    )
    before = engine.full_state_dict(rank0_only=False)
    losses = []
    for _ in range(8):
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(16, 64, generator=generator)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = engine.full_state_dict(rank0_only=False)
    reduced = engine.stats.wire.nbytes["shard/reduce_scatter"]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "names": sorted(quantized_names(engine)),
        "base": all(torch.equal(before[n], after[n]) for n in before if "base" in n),
        "losses": losses,
        "reduced": reduced,
        "expected": trainable * 4 // 2,
    }


def test_a_frozen_base_is_in_mxfp8_and_its_adapters_are_dense(
    workers: Callable[[int], Any],
) -> None:
    found = workers(2).run(train_adapter)[0]
    assert found["names"] == ["blocks.0.base.weight", "blocks.1.base.weight"]
    assert found["base"]
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert found["reduced"] == found["expected"]


def ranks_that_skip() -> list[float]:
    """Ranks use and recompute different blocks, other ones in every step."""
    torch.manual_seed(0)
    model = Decoder(width=32, depth=3)
    engine = sshsdp.shard(model, runtime=policy())
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=1e-3))
    losses = []
    for step in range(4):
        kept = [
            block
            for index, block in enumerate(model.blocks)
            if index == 1 or (index // 2 + step) % 2 == dist.get_rank()
        ]

        def forward(tokens: torch.Tensor, kept: Any = kept) -> torch.Tensor:
            hidden = model.embedding(tokens) + model.position[: tokens.shape[1]]
            for block in kept:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return model.head(model.norm(hidden))

        model.forward = forward  # type: ignore[method-assign]
        logits = model(torch.arange(6)[None])
        loss = functional.cross_entropy(logits[0], torch.arange(1, 7))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_ranks_may_use_and_recompute_different_blocks(workers: Callable[[int], Any]) -> None:
    losses = workers(2).run(ranks_that_skip)
    assert all(len(each) == 4 for each in losses)
