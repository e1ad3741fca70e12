"""Chunked tensors through torch.distributed.checkpoint: any cut loads into any other."""

from __future__ import annotations

import itertools
import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from sshsdp.checkpoint.chunks import ChunkedTensor
from sshsdp.layout.pieces import Piece

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Shape = tuple[int, ...]


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> tuple[list[int], bool]:
    """Where a flat range is cut (pieces may be empty), and whether it is stored transposed."""
    numel = math.prod(shape)
    inner = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
    return [0, *inner, numel], len(shape) == 2 and draw(st.booleans())


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[Shape, tuple[list[int], bool], tuple[list[int], bool]]:
    """A shape, how it is cut for a save, and how for a load."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return shape, draw(cuts(shape)), draw(cuts(shape))


def chunked(whole: torch.Tensor, cut: tuple[list[int], bool]) -> tuple[Any, torch.Tensor]:
    """The tensor in pieces, and the flat data that they view."""
    bounds, transposed = cut
    flat = (whole.t() if transposed else whole).reshape(-1).clone()
    pieces = [
        (
            Piece(
                name="w",
                shape=tuple(whole.shape),
                start=start,
                stop=stop,
                offset=start,
                transposed=transposed,
            ),
            flat[start:stop],
        )
        for start, stop in itertools.pairwise(bounds)
    ]
    return ChunkedTensor(tuple(whole.shape), whole.dtype, pieces), flat


@settings(deadline=None, max_examples=40)
@given(reshardings())
def test_what_is_saved_in_one_cut_loads_in_another(
    case: tuple[Shape, tuple[list[int], bool], tuple[list[int], bool]],
) -> None:
    shape, save_cut, load_cut = case
    whole = torch.randn(shape)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"w": chunked(whole, save_cut)[0]}, checkpoint_id=folder, no_dist=True)
        target, flat = chunked(torch.zeros(shape), load_cut)
        plain = torch.zeros(shape)
        dcp.load({"w": target}, checkpoint_id=folder, no_dist=True)
        dcp.load({"w": plain}, checkpoint_id=folder, no_dist=True)
    assert torch.equal(flat, (whole.t() if load_cut[1] else whole).reshape(-1))
    assert torch.equal(plain, whole)


@settings(deadline=None, max_examples=20)
@given(reshardings())
def test_an_ordinary_tensor_loads_into_pieces(
    case: tuple[Shape, tuple[list[int], bool], tuple[list[int], bool]],
) -> None:
    shape, _, cut = case
    whole = torch.randn(shape)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"w": whole}, checkpoint_id=folder, no_dist=True)
        target, flat = chunked(torch.zeros(shape), cut)
        dcp.load({"w": target}, checkpoint_id=folder, no_dist=True)
    assert torch.equal(flat, (whole.t() if cut[1] else whole).reshape(-1))


def test_empty_pieces_are_left_out() -> None:
    """pytorch/pytorch#150862: an empty shard shared its offset with a full one and hid it."""
    tensor, _ = chunked(torch.arange(6.0).reshape(3, 2), ([0, 0, 2, 2, 6, 6], False))
    assert [offsets for offsets, _ in tensor.chunks()] == [(0, 0), (1, 0)]
    assert len(tensor.__create_write_items__("w", tensor)) == 2


def test_a_rank_without_pieces_saves_nothing_and_misses_nothing(tmp_path: Any) -> None:
    """pytorch/pytorch#163480: "missing key" where a rank held no part of a tensor."""
    whole = torch.ones(1, 4)
    dcp.save({"w": whole}, checkpoint_id=tmp_path, no_dist=True)
    empty = ChunkedTensor((1, 4), torch.float32, [])
    dcp.load({"w": empty}, checkpoint_id=tmp_path, no_dist=True)
    assert empty.__create_write_items__("w", empty) == []


def test_arithmetic_on_parts_is_refused() -> None:
    tensor, _ = chunked(torch.ones(4), ([0, 4], False))
    with pytest.raises(RuntimeError, match="full_state_dict"):
        tensor + 1
