"""First values come from rank 0, whatever the other ranks hold, meta tensors included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from tests.support.compare import ROUNDING, assert_within, relative_error
from tests.support.oddities import ODDITIES
from tests.support.training import OWN_DTYPES, Recipe, prepare_model, subject_of
from tests.support.zoo import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.subject import Subject

ALL = [subject.name for subject in (*SUBJECTS, *ODDITIES)]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a plain model, non-persistent ones included."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_holds(model: nn.Module, engine: sshsdp.Engine, expected: dict[str, Any]) -> None:
    with engine.unsharded():
        actual = values_of(model)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    for name, buffer in model.named_buffers():
        assert buffer.device.type == "cpu", name


# Other values on other ranks


def shard_other_values() -> None:
    for name in ALL:
        subject = subject_of(Recipe(subject=name))
        expected = values_of(subject.model(seed=0))
        model = subject.model(seed=dist.get_rank())
        for buffer in model.buffers():
            buffer.add_(dist.get_rank())
        engine = sshsdp.shard(model, units=subject.units, **OWN_DTYPES)
        assert_holds(model, engine, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_s_weights_and_buffers_win(workers: Callable[[int], Any], size: int) -> None:
    workers(size).run(shard_other_values)


def shard_meta_elsewhere() -> None:
    for name in ALL:
        subject = subject_of(Recipe(subject=name))
        expected = values_of(subject.model())
        model = built_on_meta(subject) if dist.get_rank() else subject.model()
        ties = _ties(model)
        engine = sshsdp.shard(model, units=subject.units, **OWN_DTYPES)
        assert _ties(model) == ties
        assert_holds(model, engine, expected)


def built_on_meta(subject: Subject) -> nn.Module:
    with torch.device("meta"):
        return subject.build().train()


def _ties(model: nn.Module) -> list[list[str]]:
    """Names that share a parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_other_than_0_may_hold_the_model_on_meta(
    workers: Callable[[int], Any], size: int
) -> None:
    """Every rank with the whole model in host memory: huggingface/transformers#43749."""
    workers(size).run(shard_meta_elsewhere)


def train_from_meta(recipe: Recipe) -> list[float]:
    subject = subject_of(recipe)
    model = built_on_meta(subject) if dist.get_rank() else prepare_model(recipe)
    engine = sshsdp.shard(model, units=subject.units, **OWN_DTYPES)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        loss = subject.loss(model, subject.micro_batch(step, 0, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def train_from_memory(recipe: Recipe, size: int) -> list[float]:
    subject, model = subject_of(recipe), prepare_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        total = 0.0
        for rank in range(size):
            loss = subject.loss(model, subject.micro_batch(step, 0, rank)) / size
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("subject", ["decoder", "llama", "bert"])
def test_training_from_meta_equals_training_from_memory(
    workers: Callable[[int], Any], subject: str
) -> None:
    """Metrics were random though the loss fell: pytorch/pytorch#105840."""
    recipe = Recipe(subject=subject)
    expected = train_from_memory(recipe, 2)
    for losses in workers(2).run(train_from_meta, recipe):
        assert losses == pytest.approx(expected, rel=ROUNDING)


# Meta on every rank


class Rotary(nn.Module):
    """Computes a non-persistent buffer in ``reset_parameters``, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        with torch.no_grad():
            self.table.copy_(torch.arange(4.0).cos())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.table


def meta_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Rotary(), nn.LayerNorm(4), nn.Linear(4, 4))
        model[3].weight = model[0].weight
    return model


def initialize_everywhere() -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = meta_model()
    engine = sshsdp.shard(model, units=("?",), **OWN_DTYPES)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model[3].weight is model[0].weight
    model(torch.ones(2, 4)).sum().backward()
    return {**engine.full_state_dict(rank0_only=False), "1.table": model[1].table}


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_on_meta_everywhere_is_initialised_by_its_modules(
    workers: Callable[[int], Any], size: int
) -> None:
    by_rank = workers(size).run(initialize_everywhere)
    first = by_rank[0]
    assert torch.equal(first["2.weight"], torch.ones(4))
    assert torch.equal(first["1.table"], torch.arange(4.0).cos())
    assert 0 < first["0.weight"].abs().max() <= 0.5
    assert 0 < first["1.scale"].abs().max()
    for other in by_rank[1:]:
        assert all(torch.equal(value, first[name]) for name, value in other.items())


def initialize_transformers() -> tuple[float, float]:
    model = built_on_meta(subject_of(Recipe(subject="llama")))
    engine = sshsdp.shard(model, **OWN_DTYPES)
    whole = engine.full_state_dict(rank0_only=False)
    weight = whole["model.layers.0.mlp.up_proj.weight"]
    loss = subject_of(Recipe(subject="llama")).loss(model, torch.arange(7)[None])
    assert torch.equal(whole["model.norm.weight"], torch.ones(16))
    return weight.std().item(), loss.item()


def test_a_transformers_model_on_meta_is_initialised_by_its_own_rule(
    workers: Callable[[int], Any],
) -> None:
    for deviation, loss in workers(2).run(initialize_transformers):
        assert 0.01 < deviation < 0.03
        assert 3.0 < loss < 4.0


class Bare(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def shard_uninitialisable() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    try:
        sshsdp.shard(model)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_module_on_meta_that_cannot_be_initialised_is_named(
    workers: Callable[[int], Any],
) -> None:
    for message in workers(2).run(shard_uninitialisable, timeout=30):
        assert "module '1' (Bare)" in message
        assert "reset_parameters()" in message


# What arrives


def shard_mixed_dtypes() -> dict[str, Any]:
    """A bf16 model with one fp32 parameter, as checkpoints of state space models hold them."""
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=None))
    masters = {name: value.dtype for name, value in engine.full_state_dict().items()}
    return {"runtime": [p.dtype for p in model.parameters()], "masters": set(masters.values())}


def test_each_parameter_may_keep_its_own_dtype_over_fp32_masters(
    workers: Callable[[int], Any],
) -> None:
    """A mixed-dtype checkpoint broke the sharding: NVIDIA-NeMo/Automodel#2419."""
    for rank, found in enumerate(workers(2).run(shard_mixed_dtypes)):
        assert found["runtime"] == [torch.bfloat16] * 2 + [torch.float32] * 2
        assert found["masters"] == ({torch.float32} if rank == 0 else set())


def keep_identity() -> None:
    model = prepare_model(Recipe(subject="decoder"))
    parameters = dict(model.named_parameters())
    parameters["norm.weight"].tag = "mine"
    engine = sshsdp.shard(model, **OWN_DTYPES)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.norm.weight.tag == "mine"
    assert model.head.weight is model.embedding.weight
    engine.close()
    assert model.norm.weight.tag == "mine"
    assert model.head.weight is model.embedding.weight


def test_parameters_keep_their_identity_and_their_attributes(
    workers: Callable[[int], Any],
) -> None:
    workers(2).run(keep_identity)


def train_closed_model(recipe: Recipe) -> list[torch.Tensor]:
    """After `close`, an ordinary model: whole on every rank, trainable, shardable again."""
    subject, model = subject_of(recipe), prepare_model(recipe)
    expected = values_of(model)
    engine = sshsdp.shard(model, units=subject.units, **OWN_DTYPES)
    engine.close()
    engine.close()
    assert all(torch.equal(value, expected[name]) for name, value in values_of(model).items())
    subject.loss(model, subject.micro_batch(0, 0, 0)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    engine = sshsdp.shard(model, units=subject.units, **OWN_DTYPES)
    assert_holds(model, engine, values_of(prepare_model(recipe)))
    return grads


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("subject", ["decoder", "non-contiguous", "shared over blocks"])
def test_a_closed_engine_leaves_an_ordinary_model(
    workers: Callable[[int], Any], subject: str
) -> None:
    recipe = Recipe(subject=subject)
    plain = prepare_model(recipe)
    data = subject_of(recipe).micro_batch(0, 0, 0)
    subject_of(recipe).loss(plain, data).backward()
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    for grads in workers(2).run(train_closed_model, recipe):
        for actual, wanted in zip(grads, expected, strict=True):
            assert_within(relative_error(actual, wanted), ROUNDING)
