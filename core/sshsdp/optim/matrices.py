"""Which matrices an optimizer wants to see whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sshsdp.layout.optimization_units import OptimizationUnit
from sshsdp.optim.granularity import granularity_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from sshsdp.engine.slots import ParameterSlot

__all__ = ["matrices_for", "whole_matrix"]


def whole_matrix(slot: ParameterSlot) -> tuple[OptimizationUnit, ...]:
    """A parameter as one matrix, of its own shape."""
    unit = OptimizationUnit(
        name=slot.name,
        parameter=slot.name,
        offsets=(0,) * len(slot.shape),
        sizes=slot.shape,
        shape=slot.shape,
    )
    return (unit,)


def matrices_for(
    optimizer: torch.optim.Optimizer,
) -> Callable[[ParameterSlot], tuple[OptimizationUnit, ...]] | None:
    """How an optimizer takes parameters that it must see whole; None: it works on flat shards."""
    return None if granularity_of(optimizer) == "element" else whole_matrix
