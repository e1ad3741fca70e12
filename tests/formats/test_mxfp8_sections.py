"""Shards that are cut at 32 full rows are quantized as the whole parameters are, bit for bit.

The reference quantizes every parameter whole; the subject is a plan of the planner, each shard of
which is written on its own, with the gather outputs as the concatenation of the shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sshsdp.formats.mxfp8 import FlatBlocks, MXFP8Format, blocks_of, write_piece
from sshsdp.formats.mxfp8_blocks import quantize
from sshsdp.formats.mxfp8_scales import swizzle
from sshsdp.layout.address_space import AddressSpace, Region
from sshsdp.layout.planner import RegionRequest, plan_address_space

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sshsdp.formats.mxfp8 import Orientation
    from sshsdp.formats.mxfp8_blocks import BlockScaled, ScaleRounding


@dataclass
class Sections:
    """All four sections of a space, written shard by shard."""

    space: AddressSpace
    rowwise: FlatBlocks
    columnwise: FlatBlocks
    swizzled: bool

    def of(self, name: str, orientation: Orientation) -> BlockScaled:
        flat: FlatBlocks = getattr(self, orientation)
        return blocks_of(
            self.space.by_name[name],
            orientation,
            lambda start, shape, stride: flat.data.as_strided(shape, stride, start),
            lambda start, shape, stride: flat.scales.as_strided(shape, stride, start),
            is_swizzled=self.swizzled and orientation == "rowwise",
        )


def values_of(space: AddressSpace, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.zeros(space.numel)
    for name, parameter in parameters.items():
        region = space.by_name[name]
        flat.as_strided(region.shape, region.stride, region.start).copy_(parameter)
    return flat


def write_in_parts(
    space: AddressSpace,
    parameters: dict[str, torch.Tensor],
    num_parts: int,
    rounding: ScaleRounding = "rceil",
    *,
    swizzles: bool = False,
) -> Sections:
    values = values_of(space, parameters)
    whole = [FlatBlocks.empty(space.numel, values.device) for _ in range(2)]
    span = space.numel // num_parts
    for part in range(num_parts):
        mine = [blocks.range(part * span, (part + 1) * span) for blocks in whole]
        for piece in space.pieces(part * span, (part + 1) * span):
            place = (piece.offset, piece.offset + piece.numel)
            own = values[part * span :][slice(*place)].clone()
            targets = [blocks.range(*place) for blocks in mine]
            write_piece(own, piece, rounding, *targets, swizzles_rowwise=swizzles)
    return Sections(space, *whole, swizzled=swizzles)


def assert_written_as_a_whole(
    sections: Sections, parameters: dict[str, torch.Tensor], rounding: ScaleRounding = "rceil"
) -> None:
    for name, parameter in parameters.items():
        for orientation, dim in (("rowwise", -1), ("columnwise", -2)):
            expected = quantize(parameter, dim, rounding)
            actual = sections.of(name, orientation)
            scales = actual.scales
            if actual.is_swizzled:
                rows = expected.scales.reshape(-1, expected.scales.shape[-1])
                expected = type(expected)(expected.data, swizzle(rows), dim, is_swizzled=True)
            else:
                assert actual.scales.shape == expected.scales.shape
            assert actual.dim == dim
            for mine, whole in ((actual.data, expected.data), (scales, expected.scales)):
                assert torch.equal(mine.view(torch.uint8), whole.view(torch.uint8)), (
                    name,
                    orientation,
                )
            assert torch.equal(actual.dequantize(), quantize(parameter, dim, rounding).dequantize())


def plan(
    shapes: Iterable[tuple[int, ...]],
    num_shards: int,
    num_slices: int = 1,
    *,
    num_rows: int = 32,
    pack: bool = False,
) -> AddressSpace:
    runtime_format = MXFP8Format()
    requests = []
    for index, shape in enumerate(shapes):
        cuts = runtime_format.cuts(shape, num_rows)
        requests.append(
            RegionRequest(
                name=f"w{index}",
                shape=shape,
                cut_unit=cuts.unit,
                transposed_cut_unit=None if pack else cuts.transposed_unit,
                pack="pack" if pack else None,
            )
        )
    return plan_address_space(
        requests,
        num_shards=num_shards,
        num_update_slices=num_slices,
        alignment=runtime_format.alignment,
    )


def random_parameters(space: AddressSpace, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for region in space.regions:
        noise = torch.randn(region.shape, generator=generator)
        exponents = torch.randint(-20, 20, region.shape[-1:], generator=generator)
        parameters[region.name] = noise * torch.exp2(exponents.float())
    return parameters


SIZES = st.integers(1, 7).map(lambda count: 32 * count)
MATRICES = st.tuples(SIZES, SIZES)
EXPERTS = st.tuples(st.integers(1, 3), SIZES, SIZES)


@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(MATRICES | EXPERTS, min_size=1, max_size=5),
    num_shards=st.sampled_from([1, 2, 3, 4, 5, 8]),
    num_slices=st.sampled_from([1, 2, 3]),
    rounding=st.sampled_from(["rceil", "floor", "ceil", "even"]),
    seed=st.integers(0, 99),
)
def test_shards_hold_the_bits_of_whole_parameters(
    shapes: list[tuple[int, ...]],
    num_shards: int,
    num_slices: int,
    rounding: ScaleRounding,
    seed: int,
) -> None:
    space = plan(shapes, num_shards, num_slices)
    parameters = random_parameters(space, seed)
    sections = write_in_parts(space, parameters, num_shards * num_slices, rounding)
    assert_written_as_a_whole(sections, parameters, rounding)


@settings(deadline=None)
@given(widths=st.lists(SIZES, min_size=2, max_size=3), width=SIZES, num_shards=st.integers(1, 4))
def test_a_pack_is_quantized_as_one_matrix(widths: list[int], width: int, num_shards: int) -> None:
    space = plan([(height, width) for height in widths], num_shards, pack=True)
    parameters = random_parameters(space)
    sections = write_in_parts(space, parameters, num_shards)
    assert_written_as_a_whole(sections, parameters)
    first, last = space.regions[0], space.regions[-1]
    assert last.stop - first.start == sum(widths) * width
    packed = Region(name="w0", start=first.start, shape=(sum(widths), width))
    together = AddressSpace(regions=(packed,), numel=space.numel, num_shards=num_shards)
    joined = Sections(together, sections.rowwise, sections.columnwise, swizzled=False)
    assert_written_as_a_whole(joined, {"w0": torch.cat([*parameters.values()])})


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_transposed_parameter_is_quantized_along_its_own_dims(num_shards: int) -> None:
    region = Region(name="w", start=0, shape=(96, 128), transposed=True)
    space = AddressSpace(regions=(region,), numel=96 * 128, num_shards=num_shards)
    parameters = random_parameters(space)
    sections = write_in_parts(space, parameters, num_shards)
    assert_written_as_a_whole(sections, parameters)
    assert not sections.of("w", "rowwise").data.is_contiguous()


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("shape", [(384, 256), (3, 128, 384)])
def test_shards_cut_at_128_rows_hold_swizzled_scales(
    shape: tuple[int, ...], num_shards: int
) -> None:
    space = plan([shape, (128, 128)], num_shards, num_rows=128)
    parameters = random_parameters(space)
    sections = write_in_parts(space, parameters, num_shards, swizzles=True)
    assert_written_as_a_whole(sections, parameters)


def test_large_pieces_are_quantized_chunk_by_chunk_with_the_same_bits() -> None:
    space = plan([(1024, 544)], 1)
    parameters = random_parameters(space)
    assert math.prod(space.regions[0].shape) > 2 * 2**18
    assert_written_as_a_whole(write_in_parts(space, parameters, 1), parameters)


def test_a_gather_moves_1_03_bytes_per_element() -> None:
    sections = FlatBlocks.empty(64 * 1024, torch.device("cpu"))
    moved = sections.data.nbytes + sections.scales.nbytes
    assert moved == 64 * 1024 * MXFP8Format().bytes_per_element
    assert moved / (64 * 1024) == 1 + 1 / 32


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((64, 96), None),
        ((2, 64, 96), None),
        ((64,), "1-D"),
        ((64, 100), "multiples of 32"),
        ((100, 64), "multiples of 32"),
        ((0, 64), "multiples of 32"),
        ((2, 2, 64, 64), "4-D"),
    ],
)
def test_shapes_that_have_no_blocks_are_told_apart(shape: tuple[int, ...], why: str | None) -> None:
    found = MXFP8Format.why_not(shape)
    assert found is None if why is None else why in (found or "")


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="rounding must be one of"):
        MXFP8Format(rounding="nearest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be one of"):
        MXFP8Format(backend="cuda")  # type: ignore[arg-type]
