"""Parameters without a gradient: unused by all ranks, by some, in some steps or micro-batches."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sshsdp
from tests.support.compare import ROUNDING, assert_within, relative_error
from tests.support.oddities import Branches, mean_square
from tests.support.subject import seeded
from tests.support.training import OWN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")

# Which branch a rank takes in a micro-batch: rows are steps, columns ranks (taken modulo).
PLANS: dict[str, list[list[int]]] = {
    "never the third": [[0, 0], [1, 1], [0, 0], [1, 1]],
    "one after another": [[0, 0], [1, 1], [2, 2], [0, 0], [2, 2]],
    "another on each rank": [[0, 1], [1, 0], [0, 2], [2, 1], [0, 0]],
    "late on one rank": [[0, 0], [0, 0], [0, 1], [1, 1], [2, 0]],
}


@dataclass(frozen=True)
class Run:
    """Final weights, step counts of the optimizer by parameter, and clipped norms."""

    weights: dict[str, torch.Tensor]
    counts: dict[str, float]
    norms: list[float]


def build() -> nn.Module:
    with seeded(3):
        return Branches()


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.5)


def batch(step: int, micro: int, rank: int, plan: list[list[int]]) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    row = plan[(step + micro) % len(plan)]
    return torch.randn(3, 8, generator=generator), row[rank % len(row)]


def train_plain(plan: list[list[int]], size: int, optimizer_name: str, micro_batches: int) -> Run:
    model = build()
    optimizer = make_optimizer(model, optimizer_name)
    norms = []
    for step in range(2 * len(plan)):
        totals: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(size):
            model.zero_grad()
            for micro in range(micro_batches):
                mean_square(model, batch(step, micro, rank, plan)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    totals[parameter] = totals.get(parameter, 0) + parameter.grad
        for parameter in model.parameters():
            parameter.grad = totals[parameter] / size if parameter in totals else None
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    counts = {names[p]: float(s["step"]) for p, s in optimizer.state.items() if "step" in s}
    return Run({n: p.detach() for n, p in model.named_parameters()}, counts, norms)


def train_sshsdp(
    plan: list[list[int]], optimizer_name: str, micro_batches: int, defers: bool
) -> Run:
    model = build()
    engine = sshsdp.shard(model, **OWN_DTYPES)
    optimizer = engine.attach(make_optimizer(model, optimizer_name))
    norms = []
    for step in range(2 * len(plan)):
        for micro in range(micro_batches):
            loss = mean_square(model, batch(step, micro, dist.get_rank(), plan))
            if defers and micro + 1 < micro_batches:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(engine.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    whole = engine.full_optimizer_state_dict(optimizer)
    names = [name for name, _ in model.named_parameters()]
    counts = {
        names[index]: float(state["step"])
        for index, state in whole.get("state", {}).items()
        if "step" in state
    }
    return Run(engine.full_state_dict(), counts, norms)


@pytest.mark.parametrize(("micro_batches", "defers"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("plan", PLANS)
def test_unused_parameters_are_treated_as_in_plain_torch(
    workers: Callable[[int], Any], plan: str, optimizer: str, micro_batches: int, defers: bool
) -> None:
    """Used by no rank: value, momentum and step count stay. By some: zeros count for the rest."""
    size = 2
    expected = train_plain(PLANS[plan], size, optimizer, micro_batches)
    actual = workers(size).run(train_sshsdp, PLANS[plan], optimizer, micro_batches, defers)[0]
    for name, weight in expected.weights.items():
        assert_within(relative_error(actual.weights[name], weight), ROUNDING, name)
    assert actual.counts == expected.counts
    assert actual.norms == pytest.approx(expected.norms, rel=ROUNDING)


def test_unused_parameters_are_treated_as_in_plain_torch_on_three_ranks(
    workers: Callable[[int], Any],
) -> None:
    plan = [[0, 1, 1], [2, 2, 0], [1, 1, 1]]
    expected = train_plain(plan, 3, "adamw", 1)
    actual = workers(3).run(train_sshsdp, plan, "adamw", 1, True)[0]
    for name, weight in expected.weights.items():
        assert_within(relative_error(actual.weights[name], weight), ROUNDING, name)
    assert actual.counts == expected.counts


def keep_unused() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = sshsdp.shard(model, **OWN_DTYPES)
    optimizer = engine.attach(make_optimizer(model, "adamw"))
    for step in range(3):
        with engine.record_collectives() as records:
            mean_square(model, batch(step, 0, dist.get_rank(), [[0]])).backward()
        reduced = [record.label for record in records if record.kind == "reduce_scatter"]
        assert sorted(reduced) == sorted(unit.name for unit in engine.units)
        optimizer.step()
        optimizer.zero_grad()
    after = engine.full_state_dict(rank0_only=False)
    for name, value in before.items():
        is_used = name.startswith(("first.", "blocks.0."))
        assert torch.equal(after[name], value) != is_used, name


def test_what_no_rank_used_keeps_its_value_although_its_unit_was_reduced(
    workers: Callable[[int], Any],
) -> None:
    workers(2).run(keep_unused)


def compare_with_ddp() -> float:
    """Largest difference from DistributedDataParallel with ``find_unused_parameters``."""
    plan = PLANS["another on each rank"]
    sharded = build()
    engine = sshsdp.shard(sharded, **OWN_DTYPES)
    optimizers = [engine.attach(make_optimizer(sharded, "sgd"))]
    plain = build()
    replicated = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizers.append(make_optimizer(plain, "sgd"))
    for step in range(8):
        data = batch(step, 0, dist.get_rank(), plan)
        for model in (sharded, replicated):
            mean_square(model, data).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = engine.full_state_dict(rank0_only=False)
    return max(relative_error(weights[name], value) for name, value in plain.state_dict().items())


def test_what_some_ranks_used_is_averaged_as_in_ddp(workers: Callable[[int], Any]) -> None:
    assert_within(max(workers(2).run(compare_with_ddp)), ROUNDING)


def backward_of_nothing() -> None:
    """A loss that needs no parameter at all, on rank 1: as when its batch is all padding."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = sshsdp.shard(model, units=("?",), **OWN_DTYPES)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    before = engine.full_state_dict(rank0_only=False)
    x = torch.ones(1, 4)
    scale = 0.0 if dist.get_rank() == 1 else 1.0
    (scale * model(x).sum()).backward()
    optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    # Rank 0's gradient of the last bias is 1 and rank 1's is 0: their mean is applied.
    assert torch.equal(after["1.bias"], before["1.bias"] - 0.5)


def test_a_rank_whose_loss_is_masked_out_counts_as_zero(workers: Callable[[int], Any]) -> None:
    workers(2).run(backward_of_nothing)


class Ensemble(nn.Module):
    """Runs a chain of units, and takes some of their outputs for the loss."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(
        self, x: torch.Tensor, runs: list[int], counts: list[int], is_chained: bool
    ) -> torch.Tensor:
        outputs = {}
        for index in runs:
            outputs[index] = self.blocks[index](x)
            x = torch.tanh((outputs[index] if is_chained else x.detach()) + 1)
        return sum(outputs[index].square().mean() for index in counts)


def train_ensemble(
    seed: int, mesh: tuple[int, int] | None = None, num_frozen: int = 0, is_chained: bool = False
) -> float:
    """Largest difference from plain torch; ranks run and count units of their own choice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    choice = random.Random(seed)
    with seeded(1):
        plain = Ensemble()
    frozen = choice.sample(range(5), num_frozen)
    for index in frozen:
        plain.blocks[index].requires_grad_(False)
    trained = [index for index in range(5) if index not in frozen]
    sharded = copy.deepcopy(plain)
    device_mesh = None
    if mesh is not None:
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    engine = sshsdp.shard(sharded, device_mesh, **OWN_DTYPES)
    optimizer = engine.attach(torch.optim.SGD(sharded.parameters(), lr=0.1))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(6):
        runs, counts = [], []
        for _ in range(size):
            # A loss of frozen units alone would have no backward.
            must = choice.choice(trained)
            mine = sorted({must, *choice.sample(range(5), choice.randint(0, 4))})
            runs.append(mine)
            counts.append(sorted({must, *choice.sample(mine, choice.randint(0, len(mine)))}))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(choice.randrange(99)))
        sharded(x, runs[rank], counts[rank], is_chained).backward()
        sum(
            plain(x, *both, is_chained) / size for both in zip(runs, counts, strict=True)
        ).backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    weights = engine.full_state_dict(rank0_only=False)
    return max(relative_error(weights[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("seed", range(8))
def test_ranks_may_run_and_count_units_of_their_own_choice(
    workers: Callable[[int], Any], seed: int
) -> None:
    assert_within(max(workers(3).run(train_ensemble, seed)), ROUNDING)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_a_two_dimensional_mesh_may_do_so_too(
    workers: Callable[[int], Any], seed: int
) -> None:
    assert_within(max(workers(4).run(train_ensemble, seed, (2, 2))), ROUNDING)


@pytest.mark.parametrize("is_chained", [False, True])
@pytest.mark.parametrize("num_frozen", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_some_of_the_units_may_be_frozen(
    workers: Callable[[int], Any], seed: int, num_frozen: int, is_chained: bool
) -> None:
    """A rank whose backward was over, and one that was in it, waited for each other."""
    found = workers(2).run(train_ensemble, seed, None, num_frozen, is_chained)
    assert_within(max(found), ROUNDING)
