"""Where shard cuts may fall inside a parameter, and whether a plan's cuts do.

A *cut unit* is a number of elements in storage order: a cut inside a region must be a multiple of
it away from the region's start. Formats and granularities each ask for one; `Cuts.both` combines
them. A 2-D (or batched 2-D) parameter may be stored transposed, which divides its other side.

Example:
    MXFP8 needs 32 full rows, in either storage order. A ``[4096, 14336]`` weight can be cut into
    more pieces when it is stored as ``[14336, 4096]``:

    >>> rows((4096, 14336), 32, may_transpose=True)
    Cuts(unit=458752, transposed_unit=131072)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.layout.address_space import AddressSpace
    from sshsdp.layout.planner import RegionRequest

__all__ = [
    "Cuts",
    "Granularity",
    "blocks",
    "elements",
    "illegal_cuts",
    "long_rows",
    "rows",
    "whole",
]

# How finely an optimizer lets a parameter be cut: what it must see whole.
Granularity = Literal["element", "block", "row", "matrix"]


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cut units of a parameter.

    Attributes:
        unit: Stored as it is, row-major.
        transposed_unit: Stored with its last two dims swapped; None if it must not be.
    """

    unit: int = 1
    transposed_unit: int | None = None

    def both(self, other: Cuts) -> Cuts:
        """Cuts that suit two demands at once."""
        transposed = None
        if self.transposed_unit is not None and other.transposed_unit is not None:
            transposed = math.lcm(self.transposed_unit, other.transposed_unit)
        return Cuts(math.lcm(self.unit, other.unit), transposed)


def elements() -> Cuts:
    """Anywhere, in either storage order: elementwise optimizers, dense formats."""
    return Cuts(1, 1)


def blocks(size: int) -> Cuts:
    """Between blocks of ``size`` consecutive elements, counted in storage order.

    Alone, they never make the planner transpose a parameter, which would change who shares a block.

    Raises:
        ValueError: ``size`` is not positive.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    return Cuts(size, size)


def rows(shape: tuple[int, ...], count: int = 1, *, may_transpose: bool = False) -> Cuts:
    """Between groups of ``count`` full rows (last dim); a vector is one row.

    In a batch of matrices (``[E, out, in]``) the groups start anew with every matrix: if ``count``
    does not divide the number of rows, only whole matrices are cut off.

    Args:
        shape: Logical shape.
        count: Rows in a group.
        may_transpose: The demand is the same for columns, so either storage order will do.

    Raises:
        ValueError: ``count`` is not positive.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if len(shape) < 2:
        return whole(shape)
    *batch, height, width = shape

    def unit(height: int, width: int) -> int:
        starts_anew = math.prod(batch) > 1 and height % count
        return max(height if starts_anew else count, 1) * max(width, 1)

    return Cuts(unit(height, width), unit(width, height) if may_transpose else None)


def long_rows(shape: tuple[int, ...]) -> Cuts:
    """Between rows that run along the short side, so that the long side is the one that is divided.

    A wide matrix is stored transposed, or not cut at all.
    """
    if len(shape) < 2:
        return whole(shape)
    height, width = shape[-2:]
    if height >= width:
        return rows(shape)
    return Cuts(whole(shape).unit, max(height, 1))


def whole(shape: tuple[int, ...]) -> Cuts:
    """Never: all of the parameter on one rank, in either storage order."""
    numel = max(math.prod(shape), 1)
    return Cuts(numel, numel)


def illegal_cuts(
    space: AddressSpace, requests: Sequence[RegionRequest], *, num_update_slices: int = 1
) -> list[tuple[str, int]]:
    """The cuts of a plan that fall where a request forbids them.

    Args:
        space: The plan.
        requests: What it was made from.
        num_update_slices: As in `plan_address_space`.

    Returns:
        ``(name, elements from the region's start)`` for each one; empty for a legal plan.
    """
    span = space.shard_numel // num_update_slices
    found = []
    for request in requests:
        region = space.by_name[request.name]
        unit = request.transposed_cut_unit if region.transposed else request.cut_unit
        assert unit is not None
        if span == 0 or (span % unit == 0 and region.start % unit == 0):
            continue
        cuts = range((region.start // span + 1) * span, region.stop, span)
        offsets = [cut - region.start for cut in cuts]
        found += [(request.name, offset) for offset in offsets if offset % unit]
    return found
