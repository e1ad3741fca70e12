"""Flat ranges of a tensor as boxes, the form in which distributed checkpoints describe chunks.

Example:
    >>> [(box.offsets, box.sizes) for box in boxes((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Box", "boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor.

    Attributes:
        offsets: First index in every dim.
        sizes: Extent in every dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def transposed(self) -> Box:
        """The same elements where the tensor's last two dims are swapped."""
        (*o, o1, o2), (*s, s1, s2) = self.offsets, self.sizes
        return Box((*o, o2, o1), (*s, s2, s1))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut the row-major range ``[start, stop)`` of a tensor into boxes, in storage order.

    Each box is a contiguous part of the range; for a 2-D tensor there are at most three.

    Args:
        shape: Shape of the tensor; ``()`` for a scalar.
        start: First element.
        stop: One past the last element.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    first_full, last_full = -(-start // row), stop // row
    if first_full > last_full:
        return _within_row(shape, start // row, start, stop)
    found = []
    if start < first_full * row:
        found += _within_row(shape, first_full - 1, start, first_full * row)
    if first_full < last_full:
        offsets = (first_full, *[0] * (len(shape) - 1))
        found.append(Box(offsets, (last_full - first_full, *shape[1:])))
    if last_full * row < stop:
        found += _within_row(shape, last_full, last_full * row, stop)
    return found


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    row = math.prod(shape[1:])
    inner = boxes(shape[1:], start - index * row, stop - index * row)
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in inner]
