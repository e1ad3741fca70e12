"""Which matrices an optimizer wants to see whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sshsdp.layout.optimization_units import OptimizationUnit
from sshsdp.optim.granularity import granularity_of
from sshsdp.optim.row_binding import can_be_cut_by_rows

if TYPE_CHECKING:
    import torch

    from sshsdp.layout.cuts import Granularity
    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["granularity_for", "matrices_for", "whole_matrix"]


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


def granularity_for(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], slot: ParameterSlot, num_ranks: int
) -> Granularity:
    """How finely one parameter of a param group may be cut.

    Args:
        optimizer: The optimizer. Its ``sshsdp_granularity``, if it has one, decides by the shapes
            of the parameter's matrices; else its class does.
        group: The param group.
        slot: The parameter.
        num_ranks: Over how many ranks updates are spread.
    """
    choose = getattr(optimizer, "sshsdp_granularity", None)
    if choose is None:
        return granularity_of(optimizer)
    chosen: Granularity = choose(group, [unit.shape for unit in slot.optimization_units], num_ranks)
    if chosen == "row" and not can_be_cut_by_rows(slot):
        return "matrix"
    return chosen


def matrices_for(
    optimizer: torch.optim.Optimizer, slot: ParameterSlot
) -> tuple[OptimizationUnit, ...]:
    """What an optimizer sees of a parameter that it must see whole.

    Optimizers that know of optimization units (``sshsdp_granularity``) get those, others get the
    parameter as the model has it.
    """
    knows_units = hasattr(optimizer, "sshsdp_granularity")
    return slot.optimization_units if knows_units else whole_matrix(slot)
