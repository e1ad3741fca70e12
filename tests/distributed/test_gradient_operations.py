"""Norms, single gradients, skipped steps and averages, against plain torch on one process."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from sshsdp.optim import ExponentialMovingAverage
from tests.support.compare import (
    ROUNDING,
    assert_weights_close,
    assert_within,
    relative_error,
)
from tests.support.subject import seeded
from tests.support.training import OWN_DTYPES, update_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")

MESHES = [(1, 2), (2, 2), (1, 3)]


def build() -> nn.Module:
    with seeded(6):
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Linear(5, 3))
    model[2].bias.requires_grad_(False)
    return model


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1 and p.requires_grad]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


def pair(
    mesh: tuple[int, int], **update: Any
) -> tuple[nn.Module, nn.Module, sshsdp.Engine, Any, Any]:
    """A plain model and a sharded one with their optimizers."""
    plain = build()
    sharded = copy.deepcopy(plain)
    device_mesh = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    engine = sshsdp.shard(
        sharded,
        device_mesh,
        units=("?",),
        runtime=sshsdp.RuntimePolicy(dtype=None),
        update=sshsdp.UpdatePolicy(**update_dtypes(None), **update),
    )
    optimizer = engine.attach(torch.optim.AdamW(groups(sharded), lr=1e-2))
    return plain, sharded, engine, optimizer, torch.optim.AdamW(groups(plain), lr=1e-2)


def both_backward(plain: nn.Module, sharded: nn.Module, step: int, factor: float = 1.0) -> None:
    size = dist.get_world_size()
    (factor * sharded(data(step, dist.get_rank()))).square().mean().backward()
    for rank in range(size):
        ((factor * plain(data(step, rank))).square().mean() / size).backward()


def look_at_gradients(mesh: tuple[int, int]) -> None:
    plain, sharded, engine, optimizer, _ = pair(mesh)
    assert engine.gradient("0.weight") is None
    both_backward(plain, sharded, 0)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            found = engine.gradient(name)
            assert found is not None and found.shape == parameter.shape
            assert_within(relative_error(found, parameter.grad), ROUNDING, name)
    for norm_type in (1.0, 2.0, float("inf")):
        norms = engine.grad_norms(optimizer, norm_type)
        for norm, group in zip(norms, groups(plain), strict=True):
            gradients = [p.grad for p in group["params"]]
            expected = nn.utils.get_total_norm(gradients, norm_type)
            assert norm.shape == ()
            torch.testing.assert_close(norm, expected, rtol=ROUNDING, atol=0)
    with pytest.raises(KeyError, match=r"no parameter 'nope'"):
        engine.gradient("nope")
    with pytest.raises(ValueError, match=r"'2\.bias' is frozen"):
        engine.gradient("2.bias")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_are_found_by_name_and_their_norms_by_group(
    workers: Callable[[int], Any], mesh: tuple[int, int]
) -> None:
    workers(mesh[0] * mesh[1]).run(look_at_gradients, mesh)


def clip_by(mesh: tuple[int, int], norm_type: float, foreach: bool | None) -> None:
    plain, sharded, engine, optimizer, reference = pair(mesh)
    for step in range(3):
        both_backward(plain, sharded, step)
        norm = engine.clip_grad_norm_(0.1, norm_type, foreach=foreach)
        trained = [p for p in plain.parameters() if p.requires_grad]
        expected = nn.utils.clip_grad_norm_(trained, 0.1, norm_type)
        torch.testing.assert_close(norm, expected, rtol=ROUNDING, atol=0)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    weights = engine.full_state_dict(rank0_only=False)
    assert_weights_close(weights, plain.state_dict())


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_that_of_torch_for_every_norm(
    workers: Callable[[int], Any], norm_type: float, foreach: bool | None
) -> None:
    workers(4).run(clip_by, (2, 2), norm_type, foreach)


def clip_what_is_not_finite() -> None:
    _, sharded, engine, _, _ = pair((1, 2))
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    (factor * sharded(data(0, dist.get_rank()))).square().mean().backward()
    with pytest.raises(RuntimeError, match="not finite"):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_every_rank_raises_if_a_norm_is_not_finite(workers: Callable[[int], Any]) -> None:
    workers(2).run(clip_what_is_not_finite)


def skip_some_steps(mesh: tuple[int, int]) -> list[int]:
    plain, sharded, engine, optimizer, reference = pair(mesh, skip_nonfinite_steps=True)
    skipped = []
    for step in range(5):
        bad = step in (1, 3)
        if bad:
            factor = float("nan") if dist.get_rank() == step % dist.get_world_size() else 1.0
            (factor * sharded(data(step, dist.get_rank()))).square().mean().backward()
        else:
            both_backward(plain, sharded, step)
            reference.step()
        optimizer.step()
        skipped.append(engine.stats.skipped_steps)
        optimizer.zero_grad()
        reference.zero_grad()
    weights = engine.full_state_dict(rank0_only=False)
    assert_weights_close(weights, plain.state_dict())
    state = engine.full_optimizer_state_dict(optimizer)
    assert all(float(entry["step"]) == 3 for entry in state.get("state", {}).values())
    return skipped


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_with_a_nonfinite_gradient_on_one_rank_changes_nothing_on_any(
    workers: Callable[[int], Any], mesh: tuple[int, int]
) -> None:
    size = mesh[0] * mesh[1]
    assert workers(size).run(skip_some_steps, mesh) == [[0, 1, 0, 1, 0]] * size


def average_weights(mesh: tuple[int, int]) -> None:
    plain, sharded, engine, optimizer, reference = pair(mesh)
    average = ExponentialMovingAverage(engine, decay=0.8)
    expected = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    expected.update_parameters(plain)
    for step in range(4):
        both_backward(plain, sharded, step)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        average.update()
        expected.update_parameters(plain)
    before = engine.full_state_dict(rank0_only=False)
    with average.applied():
        inside = engine.full_state_dict(rank0_only=False)
        with torch.no_grad():
            output = sharded(data(9, 0))
    averaged = expected.module.state_dict()
    assert_weights_close(inside, averaged)
    assert_within(relative_error(output, expected.module(data(9, 0))), ROUNDING, "output")
    after = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(ValueError, match="decay must be from 0 to 1"):
        ExponentialMovingAverage(engine, decay=1.5)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_averaged_weights_equal_those_of_torch(
    workers: Callable[[int], Any], mesh: tuple[int, int]
) -> None:
    workers(mesh[0] * mesh[1]).run(average_weights, mesh)


def leave_parameters_out() -> list[str]:
    model = build()
    engine = sshsdp.shard(model)
    engine.attach(torch.optim.SGD(model[0].parameters(), lr=0.1))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sshsdp")
    logger.addHandler(handler)
    for _ in range(2):
        model(data(0, 0)).sum().backward()
        engine.optimizers[0].step()
    logger.removeHandler(handler)
    return [message for message in messages if "in no attached optimizer" in message]


def test_parameters_that_no_optimizer_has_are_named_once(workers: Callable[[int], Any]) -> None:
    first, second = workers(2).run(leave_parameters_out)
    assert len(first) == 1 and not second
    assert "2.weight, 3.weight, 3.bias" in first[0]


def shard_what_cannot_train(kind: str) -> None:
    model = build()
    if kind == "complex":
        model.extra = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    else:
        model.extra = nn.Embedding(4, 3, sparse=True)
    sshsdp.shard(model)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("complex", r"'extra' is torch\.complex64"),
        ("sparse", r"'extra\.weight' of Embedding\(spar"),
    ],
)
def test_parameters_that_cannot_be_trained_are_named(
    workers: Callable[[int], Any], kind: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        workers(2).run(shard_what_cannot_train, kind)


class _SparseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.ones(10, 6).to_sparse()


class Gatherer(nn.Module):
    """A module whose own backward gives a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 6))

    def forward(self) -> torch.Tensor:
        return _SparseGradient.apply(self.weight)


def get_a_sparse_gradient() -> None:
    model = Gatherer()
    sshsdp.shard(model, **OWN_DTYPES)
    model().backward()


def test_a_sparse_gradient_is_refused_by_name(workers: Callable[[int], Any]) -> None:
    with pytest.raises(AssertionError, match=r"'weight' got a gradient of layout torch\.sparse"):
        workers(2).run(get_a_sparse_gradient)
