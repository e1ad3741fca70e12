"""Which rank updates which matrix: a balance over the whole model.

Example:
    >>> assign_owners([6, 4, 3, 3], [0, 0])
    [0, 1, 1, 0]
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["assign_owners", "assign_owners_on_mesh"]


def assign_owners(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Longest processing time first: the next costly one goes to the least loaded place.

    Ties go to the earlier item and the lower place, so that every rank computes the same.

    Args:
        costs: Of the items.
        loads: What every place has to do already.

    Returns:
        The place of every item.
    """
    heap = [(load, place) for place, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, place = heap[0]
        owners[item] = place
        heapq.heapreplace(heap, (load + costs[item], place))
    return owners


def assign_owners_on_mesh(
    costs: Sequence[int], loads: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Owners as ``(row, column)`` of a mesh: rows share the work first, then the ranks of a row.

    Two stages, because what a row owns must be reduced to that row over the slow axis.

    Args:
        costs: Of the items.
        loads: What every rank has to do already, row by row.
    """
    rows = assign_owners(costs, [sum(row) for row in loads])
    owners = [(0, 0)] * len(costs)
    for row, its_loads in enumerate(loads):
        items = [item for item in range(len(costs)) if rows[item] == row]
        columns = assign_owners([costs[item] for item in items], its_loads)
        for item, column in zip(items, columns, strict=True):
            owners[item] = (row, column)
    return owners
