"""Where an owned matrix lies in the runtime shards of its space.

A matrix is a box of a parameter, a runtime shard a flat range of the address space. A `Fragment` is
a part of both: a strided view of the shard and a view of the matrix with the same elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sshsdp.layout.boxes import Box, boxes
from sshsdp.layout.pieces import Piece

if TYPE_CHECKING:
    import torch

    from sshsdp.layout.address_space import Region
    from sshsdp.layout.optimization_units import OptimizationUnit

__all__ = ["Fragment", "fragments_of", "pieces_of"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements of a matrix that lie in one runtime shard.

    Attributes:
        viewed_as: Shape in which the matrix is looked at.
        slices: The elements in it.
        shard_start: Where they begin in the shard.
        shard_stride: How they go on there.
    """

    viewed_as: tuple[int, ...]
    slices: tuple[slice, ...]
    shard_start: int
    shard_stride: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The elements in the runtime shard, or in a tensor laid out like it."""
        start = shard.storage_offset() + self.shard_start
        return shard.as_strided(self.sizes, self.shard_stride, start)

    def in_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """The elements in the (contiguous) matrix."""
        return matrix.view(self.viewed_as)[self.slices]


def fragments_of(
    unit: OptimizationUnit, region: Region, start: int, stop: int
) -> tuple[Fragment, ...]:
    """The parts of a matrix inside the range ``[start, stop)`` of the address space."""
    low = max(region.start, start) - region.start
    high = min(region.stop, stop) - region.start
    if low >= high:
        return ()
    runs = _runs(unit, region.shape)
    if len(runs) == 1 and not region.transposed:
        first, numel = runs[0]
        begin, end = max(first, low), min(first + numel, high)
        if begin >= end:
            return ()
        only = slice(begin - first, end - first)
        return (Fragment((numel,), (only,), region.start + begin - start, (1,)),)
    shape = region.shape
    found = []
    if region.transposed:
        storage_shape = (*shape[:-2], shape[-1], shape[-2])
        parts = [box.transposed() for box in boxes(storage_shape, low, high)]
    else:
        parts = boxes(shape, low, high)
    for box in parts:
        both = _intersection(box, Box(unit.offsets, unit.sizes))
        if both is not None:
            inside = tuple(
                slice(offset - own, offset - own + size)
                for offset, own, size in zip(both.offsets, unit.offsets, both.sizes, strict=True)
            )
            place = sum(o * s for o, s in zip(both.offsets, region.stride, strict=True))
            found.append(Fragment(unit.sizes, inside, region.start + place - start, region.stride))
    return tuple(found)


def pieces_of(unit: OptimizationUnit, shape: tuple[int, ...], offset: int) -> list[Piece]:
    """A matrix as flat ranges of its parameter, in row-major order.

    Args:
        unit: The matrix.
        shape: The parameter's.
        offset: Where the matrix begins in the flat tensor that holds it.
    """
    found = []
    for start, numel in _runs(unit, shape):
        found.append(
            Piece(name=unit.parameter, shape=shape, start=start, stop=start + numel, offset=offset)
        )
        offset += numel
    return [piece for piece in found if piece.numel]


def _runs(unit: OptimizationUnit, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """``(start, numel)`` of the contiguous ranges of a box, in row-major order."""
    dim = len(shape)
    while dim > 0 and unit.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    # Dims from `dim` on are whole, so the one in front of them may be cut.
    outer = max(dim - 1, 0)
    numel = math.prod(unit.sizes[outer:])
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    starts = [sum(o * s for o, s in zip(unit.offsets[outer:], strides[outer:], strict=True))]
    for index in range(outer - 1, -1, -1):
        first = unit.offsets[index]
        starts = [
            (first + step) * strides[index] + start
            for step in range(unit.sizes[index])
            for start in starts
        ]
    return [(start, numel) for start in starts]


def _intersection(left: Box, right: Box) -> Box | None:
    lows = [max(a, b) for a, b in zip(left.offsets, right.offsets, strict=True)]
    highs = [
        min(a + size_a, b + size_b)
        for a, size_a, b, size_b in zip(
            left.offsets, left.sizes, right.offsets, right.sizes, strict=True
        )
    ]
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    return Box(tuple(lows), tuple(h - low for low, h in zip(lows, highs, strict=True)))
