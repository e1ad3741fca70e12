"""All of a step but its update, with matrices that are whole on their owners or spread by rows."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from sshsdp.optim import ExponentialMovingAverage, Muon
from tests.support.compare import (
    ROUNDING,
    assert_weights_close,
    assert_within,
    relative_error,
)
from tests.support.matrices import iterating_in_full
from tests.support.oddities import Branches, mean_square
from tests.support.subject import seeded
from tests.support.training import update_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

# As in `tests.distributed.test_muon`.
TOLERANCES = {"torch": 1e-11, "owner": 1e-11, "gram": 1e-9}
pytestmark = pytest.mark.usefixtures("double")

MESHES = [(1, 2), (2, 2)]

every_kind = pytest.mark.parametrize("kind", TOLERANCES)
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=str)


def build() -> nn.Module:
    with seeded(6):
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Linear(5, 3))
    model[2].weight.requires_grad_(False)
    return model


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def make(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    rest = [p for p in trained if p.ndim < 2]
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    if kind == "torch":
        adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)
        return [torch.optim.Muon(matrices, **options), adamw]
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.01}]
    return [Muon(groups, **options, method=kind, ns_dtype=torch.get_default_dtype())]


def shard(
    kind: str, model: nn.Module, mesh: tuple[int, int], **update: Any
) -> tuple[sshsdp.Engine, list[torch.optim.Optimizer]]:
    engine = sshsdp.shard(
        model,
        dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")),
        runtime=sshsdp.RuntimePolicy(dtype=None),
        update=sshsdp.UpdatePolicy(**update_dtypes(None), **update),
    )
    return engine, engine.attach(make(kind, model))


def both_backward(plain: nn.Module, sharded: nn.Module, step: int) -> None:
    sharded(data(step, dist.get_rank())).square().mean().backward()
    for rank in range(dist.get_world_size()):
        (plain(data(step, rank)).square().mean() / dist.get_world_size()).backward()


def update(*optimizers: torch.optim.Optimizer) -> None:
    with iterating_in_full():
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_equal(kind: str, engine: sshsdp.Engine, plain: nn.Module) -> None:
    weights = engine.full_state_dict(rank0_only=False)
    assert_weights_close(weights, plain.state_dict(), TOLERANCES[kind])


def look_at_gradients(kind: str, mesh: tuple[int, int]) -> None:
    plain = build()
    sharded = copy.deepcopy(plain)
    engine, optimizers = shard(kind, sharded, mesh)
    assert engine.gradient("0.weight") is None
    both_backward(plain, sharded, 0)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            found = engine.gradient(name)
            assert found is not None and found.shape == parameter.shape
            assert_within(relative_error(found, parameter.grad), ROUNDING, name)
    references = make(kind, plain)
    for norm_type in (1.0, 2.0, float("inf")):
        for optimizer, reference in zip(optimizers, references, strict=True):
            norms = engine.grad_norms(optimizer, norm_type)
            for norm, group in zip(norms, reference.param_groups, strict=True):
                gradients = [p.grad for p in group["params"]]
                expected = nn.utils.get_total_norm(gradients, norm_type)
                torch.testing.assert_close(norm, expected, rtol=ROUNDING, atol=0)
        everything = [p for p in plain.parameters() if p.requires_grad]
        found = engine.clip_grad_norm_(0.5, norm_type)
        expected = nn.utils.clip_grad_norm_(everything, 0.5, norm_type)
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert_within(relative_error(engine.gradient(name), parameter.grad), ROUNDING, name)


@every_mesh
@every_kind
def test_gradients_and_norms_are_those_of_torch(
    workers: Callable[[int], Any], kind: str, mesh: tuple[int, int]
) -> None:
    workers(mesh[0] * mesh[1]).run(look_at_gradients, kind, mesh)


def skip_some_steps(kind: str, mesh: tuple[int, int]) -> list[int]:
    plain = build()
    sharded = copy.deepcopy(plain)
    engine, optimizers = shard(kind, sharded, mesh, skip_nonfinite_steps=True)
    references = make(kind, plain)
    skipped = []
    for step in range(5):
        if step in (1, 3):
            factor = float("nan") if dist.get_rank() == step % dist.get_world_size() else 1.0
            (factor * sharded(data(step, dist.get_rank()))).square().mean().backward()
            update(*optimizers)
        else:
            both_backward(plain, sharded, step)
            update(*optimizers, *references)
        skipped.append(engine.stats.skipped_steps)
    assert_equal(kind, engine, plain)
    return skipped


@every_mesh
@every_kind
def test_a_step_with_a_nonfinite_gradient_on_one_rank_changes_nothing_on_any(
    workers: Callable[[int], Any], kind: str, mesh: tuple[int, int]
) -> None:
    size, count = mesh[0] * mesh[1], len(make(kind, build()))
    expected = [0, count, 0, count, 0]
    assert workers(size).run(skip_some_steps, kind, mesh) == [expected] * size


def average_weights(kind: str, mesh: tuple[int, int]) -> None:
    plain = build()
    sharded = copy.deepcopy(plain)
    engine, optimizers = shard(kind, sharded, mesh)
    references = make(kind, plain)
    average = ExponentialMovingAverage(engine, decay=0.8)
    expected = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    expected.update_parameters(plain)
    for step in range(4):
        both_backward(plain, sharded, step)
        update(*optimizers, *references)
        average.update()
        expected.update_parameters(plain)
    with average.applied():
        assert_equal(kind, engine, expected.module)
        with torch.no_grad():
            output = sharded(data(9, 0))
        error = relative_error(output, expected.module(data(9, 0)))
        assert_within(error, TOLERANCES[kind], "output")
    assert_equal(kind, engine, plain)


@every_mesh
@every_kind
def test_averaged_weights_equal_those_of_torch(
    workers: Callable[[int], Any], kind: str, mesh: tuple[int, int]
) -> None:
    workers(mesh[0] * mesh[1]).run(average_weights, kind, mesh)


# Which branch a rank takes: rows are steps, columns ranks (taken modulo).
PLAN = [[0, 0], [0, 1], [1, 0], [2, 1], [0, 0], [2, 2]]


def branches() -> nn.Module:
    with seeded(3):
        model = Branches()
    # Nothing of a branch that is frozen is ever reduced, whichever ranks take it.
    model.blocks[1].requires_grad_(False)
    return model


def use_some_branches(kind: str, mesh: tuple[int, int]) -> None:
    plain = branches()
    frozen = {n: p.detach().clone() for n, p in plain.named_parameters() if not p.requires_grad}
    sharded = copy.deepcopy(plain)
    engine, optimizers = shard(kind, sharded, mesh)
    references = make(kind, plain)
    size = dist.get_world_size()
    for step, row in enumerate(PLAN):
        batches = [
            (torch.randn(3, 8, generator=torch.Generator().manual_seed(9 * step + rank)), branch)
            for rank, branch in enumerate((row * size)[:size])
        ]
        mean_square(sharded, batches[dist.get_rank()]).backward()
        for batch in batches:
            (mean_square(plain, batch) / size).backward()
        update(*optimizers, *references)
    assert_equal(kind, engine, plain)
    weights = engine.full_state_dict(rank0_only=False)
    assert frozen and all(torch.equal(weights[name], value) for name, value in frozen.items())


@every_mesh
@every_kind
def test_branches_that_are_frozen_or_that_some_ranks_use(
    workers: Callable[[int], Any], kind: str, mesh: tuple[int, int]
) -> None:
    """A rank without a gradient must come to every exchange all the same."""
    workers(mesh[0] * mesh[1]).run(use_some_branches, kind, mesh)


def clip_one_matrix(dtype: torch.dtype) -> torch.Tensor:
    model = nn.Linear(4, 4, bias=False)
    update = sshsdp.UpdatePolicy(dtype=dtype, reduce_dtype=dtype, skip_nonfinite_steps=True)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=dtype), update=update)
    optimizer = engine.attach(Muon(model.parameters(), method="owner"))
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    norm = engine.clip_grad_norm_(1.0)
    optimizer.step()
    return norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_rank_that_owns_no_gradient_speaks_in_the_dtype_of_its_peers(
    workers: Callable[[int], Any], dtype: torch.dtype
) -> None:
    """Its zero was a float32 beside its peers' bfloat16 or float64, which ended the process."""
    for norm in workers(2).run(clip_one_matrix, dtype):
        assert norm.item() == 4.0
        assert norm.dtype == torch.promote_types(dtype, torch.float32)
