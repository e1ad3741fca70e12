"""Boxes of a flat range hold exactly its elements, in order."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from sshsdp.checkpoint.chunks import ChunkedTensor
from sshsdp.layout.boxes import boxes
from sshsdp.layout.pieces import Piece

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape and a range of its elements."""
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(ranges())
def test_boxes_read_in_order_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = []
    for box in boxes(shape, start, stop):
        view = tensor
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        assert box.numel == view.numel() > 0
        parts.append(view.reshape(-1))
    found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    assert found.tolist() == list(range(start, stop))


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_matrix_range_takes_three_boxes_at_most(
    rows: int, columns: int, data: st.DataObject
) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, rows * columns)] * 2)))
    assert len(boxes((rows, columns), start, stop)) <= 3


@given(ranges(), st.booleans())
def test_chunks_write_through_to_the_local_data(
    case: tuple[tuple[int, ...], int, int], transposed: bool
) -> None:
    shape, start, stop = case
    transposed = transposed and len(shape) >= 2
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    local = torch.full((stop - start,), -1.0)
    piece = Piece(name="w", shape=shape, start=start, stop=stop, offset=0, transposed=transposed)
    for offsets, chunk in ChunkedTensor(shape, torch.float32, [(piece, local)]).chunks():
        source = whole
        for dim, (offset, size) in enumerate(zip(offsets, chunk.shape, strict=True)):
            source = source.narrow(dim, offset, size)
        chunk.copy_(source)
    stored = whole.mT if transposed else whole
    assert local.tolist() == stored.reshape(-1)[start:stop].tolist()
