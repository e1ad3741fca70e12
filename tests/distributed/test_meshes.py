"""Two-dimensional meshes, and packs on them: the same training, other layouts and other bytes.

`tests.support.training.train_plain` is the reference: one process, the same batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import sshsdp
from sshsdp.estimate.planning import plan_layout, specs_by_unit
from tests.support.compare import assert_close, worst_weight
from tests.support.runtime import assert_forward_uses_masters, assert_runtime_is_cast_of_masters
from tests.support.training import (
    Recipe,
    prepare_model,
    shard,
    subject_of,
    train_fsdp2,
    train_plain,
    train_sshsdp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MESHES = [(2, 2), (4, 1), (1, 4), (1, 3), (3, 1), (2, 1)]

SHARDINGS = ["hierarchical", "replicated"]

WAYS: dict[str, dict[str, Any]] = {
    "accumulation under no_sync": {"micro_batches": 3},
    "accumulation of reduced gradients": {"micro_batches": 2, "defer_reduction": False},
    "clipping": {"clip": 0.3},
    "groups by shape": {"decay_by_shape": True},
    "interleaved groups": {"interleaved": True},
    "frozen layers": {"frozen": ("*embed*", "*layers.0.self_attn*")},
    "recompute around units": {"checkpointing": ("around", False)},
    "recompute around units, reentrant": {"checkpointing": ("around", True)},
    "kept after forward": {"reshard": False, "prefetch": 0},
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "as they are"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("subject", ["llama", "bert"])
def test_training_over_a_mesh_equals_plain_torch(
    workers: Callable[[int], Any], subject: str, mesh: Any, sharding: Any, packs: bool
) -> None:
    recipe = Recipe(subject=subject, mesh=mesh, sharding=sharding, packs=packs, clip=1.0)
    size = mesh[0] * mesh[1]
    actual = workers(size).run(train_sshsdp, recipe)[0]
    expected = train_plain(recipe, size)
    assert_close(actual, expected)
    assert worst_weight(actual.weights, prepare_model(recipe).state_dict())[0] > 1e-3


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    "subject",
    ["fewer rows than ranks", "non-contiguous", "used by some ranks", "nested units", "a scalar"],
)
def test_oddities_train_over_two_by_two_ranks(
    workers: Callable[[int], Any], subject: str, sharding: Any
) -> None:
    recipe = Recipe(subject=subject, mesh=(2, 2), sharding=sharding, optimizer="sgd")
    assert_close(workers(4).run(train_sshsdp, recipe)[0], train_plain(recipe, 4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("way", WAYS)
def test_packed_training_over_two_by_two_ranks_equals_plain_torch_with(
    workers: Callable[[int], Any], way: str, sharding: Any
) -> None:
    recipe = Recipe(subject="llama", mesh=(2, 2), sharding=sharding, packs=True, **WAYS[way])
    assert_close(workers(4).run(train_sshsdp, recipe)[0], train_plain(recipe, 4))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("subject", ["decoder", "llama"])
def test_two_by_two_ranks_train_as_four_under_fsdp2(
    workers: Callable[[int], Any], subject: str
) -> None:
    recipe = Recipe(subject=subject, mesh=(2, 2), clip=1.0, micro_batches=2)
    ours, theirs = (workers(4).run(train, recipe)[0] for train in (train_sshsdp, train_fsdp2))
    assert_close(ours, theirs)


def check_after_steps(recipe: Recipe) -> None:
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    for step in range(4):
        subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_forward_uses_masters(recipe, model, engine, subject.micro_batch(9, 0, 0))
        assert_runtime_is_cast_of_masters(model, engine)
    saved = engine.full_state_dict(rank0_only=False)
    engine.load_full_state_dict({name: value / 2 for name, value in saved.items()})
    assert_forward_uses_masters(recipe, model, engine, subject.micro_batch(9, 0, 0))
    for name, value in engine.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, saved[name] / 2), name
    with engine.unsharded(writes=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert_forward_uses_masters(recipe, model, engine, subject.micro_batch(9, 0, 0))
    assert_runtime_is_cast_of_masters(model, engine)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "as they are"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)], ids=str)
def test_every_replica_uses_what_another_replica_updated(
    workers: Callable[[int], Any], mesh: Any, dtype: torch.dtype, packs: bool
) -> None:
    """Each rank updates its slice only; the others' must reach its runtime shard in time."""
    workers(4).run(check_after_steps, Recipe(subject="decoder", mesh=mesh, dtype=dtype))
    recipe = Recipe(subject="llama", mesh=mesh, dtype=torch.float32, packs=packs)
    workers(4).run(check_after_steps, recipe)


def measure(recipe: Recipe) -> dict[str, Any]:
    """Elements of update state here, in all, and bytes over each axis in a steady step."""
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    for step in range(2):
        subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    space_numel = sum(space.layout.numel for space in engine.spaces)
    return {
        "update": sum(tensor.numel() for g in optimizer.param_groups for tensor in g["params"]),
        "spaces": space_numel,
        "replicate": _by_kind(engine.stats, "replicate"),
        "pieces": [
            (fqn, part.start, part.tensor.numel()) for fqn, part in engine.update_parameters()
        ],
    }


def _by_kind(stats: sshsdp.Stats, axis: str) -> dict[str, int]:
    return {
        kind.partition("/")[2]: nbytes
        for kind, nbytes in stats.wire.nbytes.items()
        if kind.startswith(f"{axis}/")
    }


def test_hierarchical_sharding_divides_the_update_state_over_all_ranks(
    workers: Callable[[int], Any],
) -> None:
    """... and sends no byte over the replicate axis that classic HSDP would not have sent."""
    by_rank = workers(4).run(measure, Recipe(subject="decoder", mesh=(2, 2)))
    classic = workers(4).run(measure, Recipe(subject="decoder", mesh=(2, 2), sharding="replicated"))
    spaces = by_rank[0]["spaces"]
    assert sum(found["update"] for found in by_rank) <= spaces
    assert sum(found["update"] for found in classic) > 1.9 * sum(f["update"] for f in by_rank)
    for found, theirs in zip(by_rank, classic, strict=True):
        assert found["update"] <= spaces / 4
        assert set(found["replicate"]) == {"reduce_scatter", "all_gather"}
        assert set(theirs["replicate"]) == {"all_reduce"}
        assert sum(found["replicate"].values()) <= sum(theirs["replicate"].values())


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 3), (3, 1)], ids=str)
def test_update_regions_of_all_ranks_partition_every_parameter(
    workers: Callable[[int], Any], mesh: Any
) -> None:
    size = mesh[0] * mesh[1]
    by_rank = workers(size).run(measure, Recipe(subject="llama", mesh=mesh, packs=True))
    for name, parameter in prepare_model(Recipe(subject="llama")).named_parameters():
        pieces = sorted(
            (start, numel)
            for found in by_rank
            for fqn, start, numel in found["pieces"]
            if fqn == name
        )
        stop = 0
        for start, numel in pieces:
            assert start == stop, name
            stop += numel
        assert stop == parameter.numel(), name


def issued(recipe: Recipe) -> dict[str, list[tuple[str, int]]]:
    """What this rank issues in three steps, by axis and kind."""
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    sequences: dict[str, list[tuple[str, int]]] = {}
    with engine.record_collectives() as records:
        for step in range(3):
            subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    for record in records:
        sequence = sequences.setdefault(f"{record.axis}/{record.kind}", [])
        sequence.append((record.label, record.nbytes))
    return sequences


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("subject", ["llama", "used by some ranks", "partly used"])
def test_ranks_of_a_mesh_issue_the_same_collectives_in_the_same_order(
    workers: Callable[[int], Any], subject: str, sharding: Any
) -> None:
    recipe = Recipe(subject=subject, mesh=(2, 2), sharding=sharding, packs=subject == "llama")
    by_rank = workers(4).run(issued, recipe)
    assert any(kind.startswith("replicate/") for kind in by_rank[0])
    for sequences in by_rank[1:]:
        assert sequences == by_rank[0]


def layouts_with_packs(recipe: Recipe) -> tuple[str, str]:
    """The layout of the engine, and the one that is planned without a process group."""
    model = prepare_model(recipe)
    assert recipe.mesh is not None
    policy = sshsdp.RuntimePolicy(dtype=torch.float32, packs=sshsdp.find_packs(model))
    planned = plan_layout(
        specs_by_unit(model, policy),
        num_replicas=recipe.mesh[0],
        num_shards=recipe.mesh[1],
        update=sshsdp.UpdatePolicy(),
    )
    _, engine, _ = shard(recipe)
    return planned.digest(), engine.layout.digest()


def test_packs_are_planned_as_the_engine_lays_them_out(workers: Callable[[int], Any]) -> None:
    recipe = Recipe(subject="llama", mesh=(2, 2), packs=True)
    found = workers(4).run(layouts_with_packs, recipe)
    assert len({digest for pair in found for digest in pair}) == 1
