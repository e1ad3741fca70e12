"""Training in MXFP8 equals a single process that runs torchao's quantizer and dense products.

Both sides compute in float64 around the products, so that sums in another order differ by 1e-16.
Only a value that lies as near as that to the middle between two E4M3 values would be rounded to
another one: of the 10**7 values that a run quantizes, one in 10**7 runs does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.support.compare import (
    ROUNDING,
    assert_close,
    assert_within,
    relative_error,
    worst_weight,
)
from tests.support.training import (
    Recipe,
    prepare_model,
    shard,
    subject_of,
    train_plain,
    train_sshsdp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")

SUBJECTS = [
    "decoder of 64",
    "llama of 64",
    "odd multiples",
    "experts one by one",
    "grouped experts",
]

WAYS: dict[str, dict[str, Any]] = {
    "accumulation under no_sync": {"micro_batches": 3},
    "accumulation of reduced gradients": {"micro_batches": 2, "defer_reduction": False},
    "clipping": {"clip": 0.3},
    "groups by shape": {"decay_by_shape": True},
    "interleaved groups": {"interleaved": True},
    "recompute around units": {"checkpointing": ("around", False)},
    "recompute around units, reentrant": {"checkpointing": ("around", True)},
    "recompute inside units": {"checkpointing": ("inside", False)},
    "recompute inside units, reentrant": {"checkpointing": ("inside", True)},
    "kept after forward": {"reshard": False, "prefetch": 0},
    "gathered far ahead": {"prefetch": 5},
    "packs": {"subject": "llama of 64", "packs": True},
    "packs, accumulation under no_sync": {
        "subject": "llama of 64",
        "packs": True,
        "micro_batches": 3,
    },
    "packs, interleaved groups": {"subject": "llama of 64", "packs": True, "interleaved": True},
    "SGD": {"optimizer": "sgd"},
}


def recipe_of(**options: Any) -> Recipe:
    return Recipe(**{"subject": "decoder of 64", "mxfp8": True, "steps": 6, **options})


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_ten_steps_equal_the_reference(
    workers: Callable[[int], Any], subject: str, world: int
) -> None:
    recipe = recipe_of(subject=subject, steps=10)
    actual = workers(world).run(train_sshsdp, recipe)[0]
    assert_close(actual, train_plain(recipe, world))
    assert worst_weight(actual.weights, prepare_model(recipe).state_dict())[0] > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_the_reference_with(workers: Callable[[int], Any], way: str) -> None:
    recipe = recipe_of(**WAYS[way])
    assert_close(workers(2).run(train_sshsdp, recipe)[0], train_plain(recipe, 2))


def test_the_reference_is_not_what_dense_training_does(workers: Callable[[int], Any]) -> None:
    """Else the tests above would not notice a format that is never applied."""
    quantized, dense = recipe_of(), recipe_of(mxfp8=False)
    difference = worst_weight(train_plain(quantized, 2).weights, train_plain(dense, 2).weights)
    assert difference[0] > 1e-3
    losses = workers(2).run(train_sshsdp, dense)[0].losses
    assert losses[0] == pytest.approx(train_plain(quantized, 2).losses[0], rel=0.05)


def single_steps(recipe: Recipe) -> list[tuple[float, str]]:
    """Largest error of any gradient or weight in each step; every step starts from our weights."""
    from tests.support.mxfp8_reference import run_by_reference

    model, engine, optimizer = shard(recipe)
    subject, world = subject_of(recipe), dist.get_world_size()
    plain = run_by_reference(prepare_model(recipe))
    found = []
    for step in range(recipe.steps):
        plain.load_state_dict(engine.full_state_dict(rank0_only=False))
        plain.zero_grad()
        loss = subject.loss(model, subject.micro_batch(step, 0, dist.get_rank()))
        loss.backward()
        total = torch.zeros(())
        for rank in range(world):
            theirs = subject.loss(plain, subject.micro_batch(step, 0, rank))
            # Dividing now would change how gradients are rounded.
            theirs.backward()
            total += theirs.detach() / world
        dist.all_reduce(ours := loss.detach() / world)
        errors = [(relative_error(ours, total), "loss")]
        optimizer.step()
        optimizer.zero_grad()
        weights = engine.full_state_dict(rank0_only=False)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            # Plain SGD without momentum: the step is the gradient.
            expected = parameter.detach() - 3e-3 * parameter.grad / world
            errors.append((relative_error(weights[name], expected), name))
        found.append(max(errors))
    engine.close()
    return found


@pytest.mark.parametrize("sharding", ["hierarchical", "replicated"])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 1), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("subject", ["decoder of 64", "odd multiples", "grouped experts"])
def test_every_step_over_a_mesh_equals_the_reference(
    workers: Callable[[int], Any], subject: str, mesh: Any, sharding: Any
) -> None:
    recipe = recipe_of(subject=subject, mesh=mesh, sharding=sharding, optimizer="plain sgd")
    for step, (error, name) in enumerate(workers(mesh[0] * mesh[1]).run(single_steps, recipe)[0]):
        assert_within(error, ROUNDING, f"step {step}: {name}")


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "as they are"])
def test_packs_over_a_mesh_equal_the_reference(workers: Callable[[int], Any], packs: bool) -> None:
    recipe = recipe_of(subject="llama of 64", mesh=(2, 2), packs=packs, optimizer="plain sgd")
    for step, (error, name) in enumerate(workers(4).run(single_steps, recipe)[0]):
        assert_within(error, ROUNDING, f"step {step}: {name}")
