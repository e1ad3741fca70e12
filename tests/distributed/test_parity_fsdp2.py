"""Training with `sshsdp` equals training with FSDP2 on the same ranks, in float64 and in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from tests.support.compare import assert_close, assert_rounds_alike
from tests.support.training import Outcome, Recipe, train_fsdp2, train_sshsdp
from tests.support.zoo import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Callable

MAIN = [subject.name for subject in SUBJECTS]

# FSDP2 refuses, or fails on, the other oddities: 0-dimensional and non-contiguous parameters, a
# weight shared over two units, side paths into a unit, objects that hide their tensors.
ODD_FOR_BOTH = [
    "fewer rows than ranks",
    "called twice",
    "nested units",
    "frozen mixed in",
    "frozen bytes",
    "bare parameter",
    "borrowed weight",
    "buffers",
    "nested arguments",
    "dataclass outputs",
    "inputs without gradient",
]

WAYS = {
    "accumulation under no_sync": {"micro_batches": 3},
    "clipping": {"clip": 0.3},
    "frozen layers": {"frozen": ("embedding.*", "position", "blocks.0.*")},
    "groups by shape": {"decay_by_shape": True},
    "kept after forward": {"reshard": False},
    "recompute around units": {"checkpointing": ("around", False)},
    "recompute inside units": {"checkpointing": ("inside", False)},
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("subject", MAIN)
def test_training_equals_fsdp2(
    workers: Callable[[int], Any], subject: str, optimizer: Any, size: int
) -> None:
    recipe = Recipe(subject=subject, optimizer=optimizer)
    ours, theirs = (workers(size).run(train, recipe)[0] for train in (train_sshsdp, train_fsdp2))
    assert_close(ours, theirs)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("subject", ODD_FOR_BOTH)
def test_oddities_train_as_under_fsdp2(workers: Callable[[int], Any], subject: str) -> None:
    recipe = Recipe(subject=subject)
    ours, theirs = (workers(2).run(train, recipe)[0] for train in (train_sshsdp, train_fsdp2))
    assert_close(ours, theirs)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_fsdp2_with(workers: Callable[[int], Any], way: str) -> None:
    recipe = Recipe(subject="decoder", **WAYS[way])
    ours, theirs = (workers(2).run(train, recipe)[0] for train in (train_sshsdp, train_fsdp2))
    assert_close(ours, theirs)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("subject", ["decoder", "llama", "bert"])
def test_bf16_compute_gives_the_losses_of_fsdp2_with_bf16_compute_and_fp32_reduction(
    workers: Callable[[int], Any], subject: str, micro_batches: int
) -> None:
    """Both cast the same fp32 masters and sum gradients in fp32; in between, kernels round."""
    recipe = Recipe(subject=subject, micro_batches=micro_batches, dtype=torch.bfloat16, clip=1.0)
    ours, theirs = (workers(2).run(train, recipe)[0] for train in (train_sshsdp, train_fsdp2))
    fp32 = workers(2).run(train_fsdp2, replace(recipe, dtype=torch.float32))[0]
    assert_rounds_alike(ours, theirs, fp32)
    assert ours.losses != fp32.losses


def test_normalisation_may_stay_in_fp32_beside_bf16_layers(workers: Callable[[int], Any]) -> None:
    """Batch normalisation on CPU takes bf16 data only with fp32 weights and statistics."""
    recipe = Recipe(subject="convolutions", clip=1.0)
    kept = {"stages.*.1.*": torch.float32}
    mixed = workers(2).run(_train_in_mixed_formats, replace(recipe, dtype=torch.bfloat16), kept)[0]
    fp32 = workers(2).run(train_sshsdp, recipe)[0]
    assert mixed.losses == pytest.approx(fp32.losses, rel=0.02)
    assert mixed.losses != fp32.losses


def _train_in_mixed_formats(recipe: Recipe, kept: dict[str, torch.dtype]) -> Outcome:
    formats = {pattern: sshsdp.DenseFormat(dtype) for pattern, dtype in kept.items()}
    return train_sshsdp(recipe, sshsdp.RuntimePolicy(dtype=torch.bfloat16, formats=formats))


def test_bf16_gradients_are_summed_in_fp32(workers: Callable[[int], Any]) -> None:
    """One rank's contribution of 2**-9 is lost in a bf16 sum with 1, and kept in an fp32 one."""
    assert workers(2).run(_sum_small_and_large) == [1 + 2.0**-9] * 2


def _sum_small_and_large() -> float:
    model = nn.Linear(1, 1, bias=False)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.bfloat16))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    value = 2.0 if dist.get_rank() == 0 else 2.0**-8
    model(torch.full((1, 1), value)).sum().backward()
    return engine.clip_grad_norm_(1e9).item()
