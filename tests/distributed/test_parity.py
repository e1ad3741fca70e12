"""Training with `sshsdp` equals plain training in one process on the same batches.

The reference (`tests.support.training.train_plain`) runs each rank's micro-batches one after
another and averages in rank order. That is the arithmetic of the sharded run, so most of these
agree bit for bit; what is asserted beyond one rank leaves room for sums in another order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.compare import assert_close, assert_identical, worst_weight
from tests.support.oddities import ODDITIES
from tests.support.training import (
    Outcome,
    Recipe,
    prepare_model,
    subject_of,
    train_plain,
    train_sshsdp,
)
from tests.support.zoo import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")

MAIN = [subject.name for subject in SUBJECTS]
ODD = [subject.name for subject in ODDITIES]

# Where one GEMM adds to what another wrote, or reads a transposed operand, rounding differs.
ROUNDS_OTHERWISE = {"non-contiguous", "called twice"}

WAYS = {
    "accumulation under no_sync": {"micro_batches": 3},
    "accumulation of reduced gradients": {"micro_batches": 3, "defer_reduction": False},
    "clipping": {"clip": 0.3},
    "clipping after accumulation": {"clip": 0.3, "micro_batches": 2},
    "frozen embedding": {"frozen": ("embedding.*", "position", "blocks.0.*")},
    "frozen norms": {"frozen": ("*norm*",)},
    "groups by shape": {"decay_by_shape": True},
    "no prefetch": {"prefetch": 0},
    "prefetch of two": {"prefetch": 2},
    "kept after forward": {"reshard": False},
    "kept after forward, accumulating": {"reshard": False, "micro_batches": 2},
    "recompute inside units": {"checkpointing": ("inside", False)},
    "recompute inside units, reentrant": {"checkpointing": ("inside", True)},
    "recompute around units": {"checkpointing": ("around", False)},
    "recompute around units, reentrant": {"checkpointing": ("around", True)},
    "all together": {
        "checkpointing": ("around", False),
        "clip": 0.3,
        "decay_by_shape": True,
        "frozen": ("blocks.1.attention.*",),
        "micro_batches": 2,
        "prefetch": 2,
    },
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("subject", MAIN + ODD)
def test_training_equals_plain_torch(
    workers: Callable[[int], Any], subject: str, optimizer: Any, size: int
) -> None:
    recipe = Recipe(subject=subject, optimizer=optimizer)
    expected = train_plain(recipe, size)
    actual = workers(size).run(train_sshsdp, recipe)[0]
    _drop_rank_local_buffers(actual.weights, expected.weights)
    assert_close(actual, expected)
    initial = prepare_model(recipe).state_dict()
    assert worst_weight({**initial, **actual.weights}, initial)[0] > 1e-3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_plain_torch_with(
    workers: Callable[[int], Any], way: str, size: int
) -> None:
    recipe = Recipe(subject="decoder", **WAYS[way])
    assert_close(workers(size).run(train_sshsdp, recipe)[0], train_plain(recipe, size))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("subject", ["llama", "bert"])
def test_recomputing_models_of_transformers_equal_plain_torch(
    workers: Callable[[int], Any], subject: str, use_reentrant: bool
) -> None:
    recipe = Recipe(subject=subject, checkpointing=("around", use_reentrant), clip=1.0)
    assert_close(workers(2).run(train_sshsdp, recipe)[0], train_plain(recipe, 2))


@pytest.mark.parametrize("subject", MAIN + ODD)
def test_one_rank_equals_plain_torch_bit_for_bit(
    workers: Callable[[int], Any], subject: str
) -> None:
    recipe = Recipe(subject=subject)
    check = assert_close if subject in ROUNDS_OTHERWISE else assert_identical
    check(workers(1).run(train_sshsdp, recipe)[0], train_plain(recipe, 1))


def test_accumulating_on_one_rank_equals_plain_torch_bit_for_bit_where_gradients_are_added(
    workers: Callable[[int], Any],
) -> None:
    """Reduced micro-batch gradients are added as plain torch adds them: one sum per element."""
    recipe = Recipe(subject="decoder", micro_batches=3, defer_reduction=False)
    assert_identical(workers(1).run(train_sshsdp, recipe)[0], train_plain(recipe, 1))


@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_one_forward_over_the_whole_batch(
    workers: Callable[[int], Any], size: int
) -> None:
    """One process that runs all ranks' rows in one forward: sums round otherwise, nothing else."""
    recipe = Recipe(subject="decoder", optimizer="sgd")
    subject = subject_of(recipe)
    model = prepare_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, weight_decay=0.01)
    losses = []
    for step in range(recipe.steps):
        rows = [subject.micro_batch(step, 0, rank) for rank in range(size)]
        loss = subject.loss(model, torch.cat(rows))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    actual = workers(size).run(train_sshsdp, recipe)[0]
    assert_close(actual, Outcome(losses, [], model.state_dict()))


def test_three_ranks_equal_plain_torch(workers: Callable[[int], Any]) -> None:
    """A world that divides neither the widths nor the vocabulary."""
    for subject in ("decoder", "fewer rows than ranks", "used by some ranks"):
        recipe = Recipe(subject=subject, clip=1.0, micro_batches=2)
        assert_close(workers(3).run(train_sshsdp, recipe)[0], train_plain(recipe, 3))


def test_repeating_a_run_gives_the_same_bits(workers: Callable[[int], Any]) -> None:
    recipe = Recipe(subject="llama", micro_batches=2, clip=1.0)
    first = workers(4).run(train_sshsdp, recipe)[0]
    again = workers(4).run(train_sshsdp, replace(recipe))[0]
    assert_identical(again, first)


def _drop_rank_local_buffers(*state_dicts: dict[str, torch.Tensor]) -> None:
    # Running statistics and call counters follow a rank's own batches; the reference saw them all.
    for state_dict in state_dicts:
        for name in [name for name in state_dict if "running_" in name or "num_" in name]:
            del state_dict[name]
