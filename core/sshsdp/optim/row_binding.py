"""Parameters cut between full rows: may they be, where, and what of them is on this rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sshsdp.layout.cuts import Cuts, long_rows, rows
from sshsdp.optim.row_shards import LocalRows, RowShard
from sshsdp.spaces.space import space_of

if TYPE_CHECKING:
    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.spaces.space import UpdateTensor

__all__ = ["can_be_cut_by_rows", "cuts_for_rows", "mark_rows"]


def can_be_cut_by_rows(slot: ParameterSlot) -> bool:
    """Whether each of the parameter's matrices is made of pieces of its stored rows.

    That is so for ``[m, n]``, for ``[E, m, n]`` with a matrix or more for each index, and for a
    parameter of more dims that is seen as ``[m, rest]``.
    """
    if len(slot.shape) == 2:
        return all(len(unit.shape) == 2 for unit in slot.optimization_units)
    if len(slot.shape) == 3:
        return all(u.sizes[0] == 1 and len(u.shape) == 2 for u in slot.optimization_units)
    return len(slot.shape) > 3 and [u.shape for u in slot.optimization_units] == [_flat(slot.shape)]


def cuts_for_rows(slot: ParameterSlot, *, is_packed: bool) -> Cuts:
    """Where the parameter may be cut: along its long side, where its storage order is free."""
    if len(slot.shape) > 3:
        return Cuts(_flat(slot.shape)[1], None)
    return rows(slot.shape) if is_packed else long_rows(slot.shape)


def mark_rows(update: UpdateTensor) -> None:
    """Tell the optimizer which rows of which matrices an update tensor holds."""
    (slot,) = update.slots
    space, region = space_of(slot), slot.region
    height, width = _flat(slot.shape) if len(slot.shape) > 3 else slot.shape[-2:]
    if region.transposed:
        height, width = width, height
    low, high = space.update_range
    first = (min(max(region.start, low), high) - region.start) // width
    last = (min(max(region.stop, low), high) - region.start) // width
    span = high - low
    matrices = []
    for unit in slot.optimization_units:
        begin, end, columns = _table_part(unit, slot.shape, height, region.transposed)
        start, stop = region.start + begin * width, region.start + end * width
        matrices.append(
            LocalRows(
                name=unit.name,
                shape=unit.shape,
                rows=slice(
                    min(max(begin, first), last) - first, min(max(end, first), last) - first
                ),
                columns=columns,
                is_cut=start // span != (stop - 1) // span,
            )
        )
    axes = [space.topology.reduce]
    if space.topology.num_update_slices > 1:
        axes.append(space.topology.replicate)
    shard = RowShard(width=width, matrices=tuple(matrices), axes=tuple(axes))
    shard.attach_to(update.tensor)


def _table_part(
    unit: OptimizationUnit, shape: tuple[int, ...], height: int, is_transposed: bool
) -> tuple[int, int, slice]:
    """First and last stored row of a matrix, counted in the parameter, and its columns."""
    if len(shape) > 3:
        return 0, height, slice(0, math.prod(shape[1:]))
    vertical, horizontal = zip(unit.offsets[-2:], unit.sizes[-2:], strict=True)
    if is_transposed:
        vertical, horizontal = horizontal, vertical
    before = unit.offsets[0] * height if len(shape) == 3 else 0
    begin = before + vertical[0]
    return begin, begin + vertical[1], slice(horizontal[0], horizontal[0] + horizontal[1])


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
