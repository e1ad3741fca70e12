"""What a test trains: a model with its data and its loss, and how to find them by name."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

__all__ = ["Subject", "by_name", "in_double", "seeded", "widened"]


# Of all models: what is asserted must not hang on the first numbers that were tried.
SEED = 1000 * int(os.environ.get("SSHSDP_SEED", "0"))


@dataclass(frozen=True)
class Subject:
    """A model with data and a loss; all of it is a function of seeds, so every rank agrees.

    Attributes:
        build: Makes the model; the caller seeds torch first.
        batch: One rank's micro-batch: ``batch(generator, rank)``.
        loss: The mean loss of a micro-batch.
        units: Name patterns for `sshsdp.shard`'s ``units`` (None: its default) and FQNs of the
            modules that FSDP2 wraps, found by the same patterns.
        differs_by_rank: Whether ranks use different parts of the model.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    units: tuple[str, ...] | None = None
    differs_by_rank: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """The model with the initial values of ``seed``."""
        with seeded(seed):
            return self.build()

    def micro_batch(self, step: int, micro: int, rank: int) -> Any:
        """The data of one rank in one micro-batch of one step."""
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank + 1)
        return self.batch(generator, rank)


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Have torch make what it makes, unless told otherwise, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widened(values: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 where that is what is computed in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class seeded:
    """Run a block from a given seed and leave torch's generator as it was."""

    def __init__(self, seed: int) -> None:
        self.seed = seed + SEED

    def __enter__(self) -> None:
        self._state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)


def by_name(subjects: list[Subject]) -> Mapping[str, Subject]:
    """An index of subjects."""
    return {subject.name: subject for subject in subjects}
