"""Muon on one process: the rule of torch.optim.Muon, in batches and through Gram matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sshsdp.optim import Muon, muon_with_adamw
from sshsdp.optim.gram_exchange import split_by_size
from sshsdp.optim.muon import choose_method
from sshsdp.optim.newton_schulz import COEFFICIENTS, gram_factors, orthogonalize
from tests.support.compare import assert_within, relative_error
from tests.support.matrices import iterating_in_full

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = [(8, 5), (5, 8), (6, 6), (8, 5), (12, 3), (1, 7)]


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(tensors: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


def run(tensors: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 20) -> None:
    for step in range(steps):
        set_gradients(tensors, 100 + step)
        optimizer.step()


@pytest.fixture
def in_full(double: None) -> Iterator[None]:
    """All is in float64, and torch.optim.Muon, which casts to bfloat16, iterates in it."""
    with iterating_in_full():
        yield


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no nesterov": {"nesterov": False, "momentum": 0.8},
    "adamw's size": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    "other polynomial": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("in_full")
def test_twenty_steps_equal_torch_s(options: str) -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    run(ours, Muon(ours, lr=0.05, ns_dtype=torch.float64, **OPTIONS[options]))
    run(theirs, torch.optim.Muon(theirs, lr=0.05, **OPTIONS[options]))
    for mine, other in zip(ours, theirs, strict=True):
        assert_within(relative_error(mine.detach(), other.detach()), 1e-11)


def test_bf16_iteration_differs_from_torch_s_by_its_rounding() -> None:
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    run(ours, Muon(ours, lr=0.05))
    run(theirs, torch.optim.Muon(theirs, lr=0.05))
    for mine, other in zip(ours, theirs, strict=True):
        assert_within(relative_error(mine.detach(), other.detach()), 2e-2)


@pytest.mark.usefixtures("in_full")
def test_experts_are_matrices_of_their_own_and_convolutions_are_flattened() -> None:
    ours = parameters([(3, 6, 4), (5, 2, 3, 3)])
    ours[1].data = ours[1].data.to(memory_format=torch.channels_last)
    experts = [nn.Parameter(part.clone()) for part in ours[0].detach()]
    flat = nn.Parameter(ours[1].detach().clone().flatten(1))
    theirs = [*experts, flat]
    mine = Muon(ours, lr=0.05, ns_dtype=torch.float64)
    other = torch.optim.Muon(theirs, lr=0.05)
    for step in range(5):
        set_gradients(ours, step)
        for index, expert in enumerate(experts):
            expert.grad = ours[0].grad[index]  # type: ignore[index]
        flat.grad = ours[1].grad.flatten(1)  # type: ignore[union-attr]
        mine.step()
        other.step()
    assert_within(relative_error(ours[0].detach(), torch.stack(experts).detach()), 1e-11)
    assert_within(relative_error(ours[1].detach().flatten(1), flat.detach()), 1e-11)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(64, 16), (32, 32), (16, 24)])
def test_gram_factors_give_what_the_iteration_gives(
    shape: tuple[int, int], condition: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    rank = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(side, rank, generator=generator, dtype=torch.float64)).Q
        for side in shape
    )
    spectrum = torch.logspace(0, -torch.tensor(condition).log10().item(), rank)
    matrix = (left * spectrum.double()) @ right.mT
    options: dict[str, Any] = {"coefficients": COEFFICIENTS, "num_steps": 5, "eps": 1e-7}
    exact = orthogonalize(matrix[None], dtype=torch.float64, **options)[0]
    # The rounding of the Gram matrix grows as its smallest eigenvalues do: by 3.4445**2 each time.
    growth = COEFFICIENTS[0] ** (2 * options["num_steps"])
    for dtype in (torch.float32, torch.float64):
        rounded = matrix.to(dtype)
        found = rounded @ gram_factors((rounded.mT @ rounded)[None], **options)[0]
        error = relative_error(found, exact)
        assert_within(error, growth * torch.finfo(dtype).eps / 2, str(dtype))


def test_a_group_of_adamw_is_torch_s_adamw() -> None:
    ours, theirs = parameters([(4,), (3, 2)]), parameters([(4,), (3, 2)])
    group = {"params": ours, "algorithm": "adamw", "betas": (0.8, 0.9), "adamw_eps": 1e-6}
    run(ours, Muon([group], lr=0.02, weight_decay=0.2))
    run(theirs, torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def test_a_state_dict_brings_an_optimizer_back() -> None:
    straight, resumed = parameters(SHAPES), parameters(SHAPES)
    optimizers = [Muon(tensors, lr=0.05) for tensors in (straight, resumed)]
    run(straight, optimizers[0], 3)
    run(resumed, optimizers[1], 3)
    again = Muon(resumed, lr=0.01)
    again.load_state_dict(optimizers[1].state_dict())
    run(straight, optimizers[0], 2)
    run(resumed, again, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"ns_steps": 0}, "ns_steps must be 1 or more"),
        ({"method": "both"}, "method must be 'auto', 'owner' or 'gram'"),
        ({"adjust_lr_fn": "mup"}, "adjust_lr_fn must be None"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters([(3, 2)]), **options)


def test_a_vector_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"parameter bias of group 0 has shape \(2,\)"):
        Muon(model.named_parameters())
    with pytest.raises(ValueError, match="algorithm must be 'muon' or 'adamw'"):
        Muon([{"params": [model.weight], "algorithm": "sgd"}])


@pytest.mark.parametrize(
    ("shape", "num_ranks", "method"),
    [((4096, 4096), 2, "owner"), ((16384, 1024), 2, "gram"), ((16384, 1024), 64, "owner")],
)
def test_the_method_with_fewer_bytes_is_taken(
    shape: tuple[int, int], num_ranks: int, method: str
) -> None:
    assert choose_method(shape, num_ranks) == method


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(4), "mlp": nn.Linear(4, 4), "bias": nn.Embedding(3, 4)}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(4, 9, bias=False)


def names_of(model: nn.Module, optimizer: Muon) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = Decoder()
    model.blocks[1].mlp.bias.requires_grad_(False)
    optimizer = muon_with_adamw(model, lr=0.1, adamw_lr=0.2, weight_decay=0.3)
    hidden, decayed, rest = names_of(model, optimizer)
    assert hidden == ["blocks.0.mlp.weight", "blocks.1.mlp.weight"]
    assert decayed == [
        "embed.weight",
        "blocks.0.bias.weight",
        "blocks.1.bias.weight",
        "head.weight",
    ]
    assert "blocks.0.norm.weight" in rest and "blocks.1.mlp.bias" not in rest
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]


def test_without_blocks_all_but_the_last_layer_is_hidden() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 2))
    hidden, decayed, _ = names_of(model, muon_with_adamw(model))
    assert hidden == ["0.weight", "2.weight"]
    assert decayed == ["3.weight"]


def test_every_choice_can_be_overridden(caplog: pytest.LogCaptureFixture) -> None:
    model = Decoder()
    with caplog.at_level("INFO", logger="sshsdp"):
        optimizer = muon_with_adamw(model, to_muon=["head.*"], to_adamw=["blocks.0.*"])
    hidden, decayed, _ = names_of(model, optimizer)
    assert hidden == ["blocks.1.mlp.weight", "head.weight"]
    assert "blocks.0.mlp.weight" in decayed
    assert "head.weight (9, 4): Muon" in caplog.text
    with pytest.raises(ValueError, match=r"both to_muon and to_adamw match 'head\.weight'"):
        muon_with_adamw(model, to_muon=["head.*"], to_adamw=["*.weight"])
    with pytest.raises(ValueError, match=r"the pattern 'nope\.\*' matches no name"):
        muon_with_adamw(model, to_muon=["nope.*"])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([3, 3, 3], [[0, 1], [2]]), ([9, 1], [[0], [1]]), ([1, 9, 1], [[0], [1], [2]]), ([2], [[0]])],
)
def test_runs_stay_below_a_limit_but_for_one_large_item(
    sizes: list[int], expected: list[list[int]]
) -> None:
    assert list(split_by_size(range(len(sizes)), sizes, 6)) == [
        range(run[0], run[-1] + 1) for run in expected
    ]
