"""MXFP8 quantization against torchao's `to_mx`, the OCP MX v1.0 rules and exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.utils import to_blocked

from sshsdp.formats.mxfp8_blocks import BlockScaled, quantize
from sshsdp.formats.mxfp8_scales import swizzle, unswizzle

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_blocks import ScaleRounding

MODES: list[ScaleRounding] = ["rceil", "floor", "ceil", "even"]
INF, NAN = math.inf, math.nan


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(actual: BlockScaled, scales: torch.Tensor, data: torch.Tensor) -> None:
    assert torch.equal(bytes_of(actual.scales), bytes_of(scales))
    assert torch.equal(bytes_of(actual.data), bytes_of(data))


def by_torchao(values: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales, data = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode(mode))
    return scales, data


def block(*values: float, filler: float = 0.0) -> torch.Tensor:
    """One row of 32 values that starts with the given ones."""
    return torch.tensor([[*values, *[filler] * (32 - len(values))]])


def wide_range(seed: int) -> torch.Tensor:
    """Magnitudes over all of float32, subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 127, (64, 96), generator=generator)
    return torch.randn(64, 96, generator=generator) * torch.exp2(exponents.float())


EDGES = {
    "zeros": torch.zeros(2, 32),
    "negative zeros": -torch.zeros(2, 32),
    "smallest subnormal": block(2.0**-149),
    "subnormals": torch.arange(32).view(1, 32) * 2.0**-149,
    "subnormals up to normal": torch.linspace(0, 2.0**-125, 64).view(2, 32),
    "largest float": block(torch.finfo(torch.float32).max, 1.0),
    "infinity": block(INF, -INF, 1.0, 0.0),
    "nan": block(NAN, 1.0, -2.0),
    "nan and infinity": block(NAN, INF),
    "one huge value": block(1e38, filler=1.0),
    "all elements of the format": torch.arange(256, dtype=torch.uint8)
    .view(torch.float8_e4m3fn)
    .float()
    .nan_to_num(0.0)
    .view(8, 32),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_get_torchaos_bits(edge: str, mode: ScaleRounding) -> None:
    assert_same_bits(quantize(EDGES[edge], -1, mode), *by_torchao(EDGES[edge], mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_random_values_get_torchaos_bits(
    seed: int, dtype: torch.dtype, mode: ScaleRounding
) -> None:
    torch.manual_seed(seed)
    for sample in (torch.randn(64, 96), wide_range(seed), torch.randn(3, 32, 64) / 50):
        values = sample.to(dtype)
        assert_same_bits(quantize(values, -1, mode), *by_torchao(values, mode))


@pytest.mark.parametrize("mode", MODES)
def test_every_power_of_two_gets_torchaos_bits(mode: ScaleRounding) -> None:
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    values = powers[:, None] * torch.linspace(-1, 1, 32)
    assert_same_bits(quantize(values, -1, mode), *by_torchao(values, mode))


@pytest.mark.parametrize("mode", MODES)
def test_columnwise_blocks_are_the_rowwise_blocks_of_the_transposed_matrix(
    mode: ScaleRounding,
) -> None:
    values = torch.randn(64, 96)
    blocks = quantize(values, -2, mode)
    assert blocks.scales.shape == (2, 96)
    assert_same_bits(blocks.mT, *by_torchao(values.t().contiguous(), mode))


# What the OCP MX v1.0 specification (sections 5.2, 5.4 and 6.3) says of single blocks, by hand: the
# scale is 2 ** (floor(log2(largest)) - 8), elements round to even and saturate at 448.
OCP = [
    # values, scale, elements
    ([1.0], 2.0**-8, [256.0]),
    ([1.75], 2.0**-8, [448.0]),
    ([1.99], 2.0**-8, [448.0]),  # 509.44 saturates
    ([1.0, 17 / 256], 2.0**-8, [256.0, 16.0]),  # 17 lies between 16 and 18: to even
    ([1.0, 19 / 256], 2.0**-8, [256.0, 20.0]),  # 19 lies between 18 and 20: to even
    ([1.0, 2.0**-17], 2.0**-8, [256.0, 2.0**-9]),  # smallest subnormal element
    ([1.0, 2.0**-18], 2.0**-8, [256.0, 0.0]),  # a tie with zero: to even
    ([1.0, 1.5 * 2.0**-18], 2.0**-8, [256.0, 2.0**-9]),
    ([-448.0, 448.0], 1.0, [-448.0, 448.0]),
    ([0.0], 2.0**-127, [0.0]),
    ([2.0**-149], 2.0**-127, [0.0]),  # below what the smallest scale reaches
    ([INF, 1.0], 2.0**120, [448.0, 0.0]),  # implementation-defined: saturates
]


@pytest.mark.parametrize(("values", "scale", "elements"), OCP)
def test_floor_follows_the_ocp_specification(
    values: list[float], scale: float, elements: list[float]
) -> None:
    blocks = quantize(block(*values), -1, "floor")
    assert blocks.scales.float().item() == scale
    assert blocks.data.float()[0, : len(elements)].tolist() == elements


@pytest.mark.parametrize(
    ("largest", "exponents"),
    [
        # largest magnitude: exponents of the scale under rceil, floor, ceil, even
        (1.0, (-8, -8, -8, -8)),
        (1.75, (-8, -8, -7, -8)),  # 448 * 2 ** -8
        (1.75 + 2.0**-10, (-7, -8, -7, -8)),
        (1.75 + 2.0**-3, (-7, -8, -7, -8)),
        (2.0 - 2.0**-4, (-7, -8, -7, -7)),  # rounds to 2 in three mantissa bits
        (2.0 - 2.0**-3, (-7, -8, -7, -8)),
        (448.0, (0, 0, 1, 0)),
        (449.0, (1, 0, 1, 0)),
        (0.0, (-127, -127, -127, -127)),
        (INF, (127, 120, 120, 120)),
    ],
)
def test_each_rounding_mode_chooses_its_scale(largest: float, exponents: tuple[int, ...]) -> None:
    for mode, exponent in zip(MODES, exponents, strict=True):
        assert quantize(block(-largest), -1, mode).scales.float().item() == 2.0**exponent, mode


@pytest.mark.parametrize("mode", MODES)
def test_a_block_with_a_nan_is_all_nan_and_its_neighbours_are_not(mode: ScaleRounding) -> None:
    values = torch.randn(1, 96)
    values[0, 40] = NAN
    blocks = quantize(values, -1, mode)
    assert bytes_of(blocks.scales)[0, 1] == 255
    is_nan = blocks.dequantize().isnan()
    assert is_nan[0, 32:64].all()
    assert not is_nan[0, :32].any()
    assert not is_nan[0, 64:].any()


@pytest.mark.parametrize("mode", MODES)
def test_an_infinity_becomes_the_largest_element_with_its_sign(mode: ScaleRounding) -> None:
    blocks = quantize(block(INF, -INF), -1, mode)
    assert blocks.data.float()[0, :2].tolist() == [448.0, -448.0]
    assert blocks.scales.float().isfinite().all()


@settings(deadline=None, max_examples=300)
@given(st.floats(2.0**-118, 2.0**120, width=32))
def test_rceil_takes_the_smallest_scale_with_which_nothing_saturates(largest: float) -> None:
    scale = Fraction(quantize(block(largest), -1, "rceil").scales.float().item())
    ratio = Fraction(torch.tensor(largest).div(448).item())
    assert scale >= ratio > scale / 2


def test_rceil_rounds_up_where_torchaos_logarithm_does_not() -> None:
    """A ratio one unit above 2 ** -8 needs the next scale: ``cvt.rp`` says so, ``log2`` does not.

    torchao's eager emulation of the instruction computes ``ceil(log2(x))`` in float32, where the
    logarithm of ``2 ** -8 * (1 + 2 ** -23)`` is -8. Compiled for sm_100 it uses the instruction.
    """
    values = block(1.75 + 2.0**-22)
    assert Fraction(values[0, 0].div(448).item()) > Fraction(1, 256)
    ours = quantize(values, -1, "rceil")
    scales, _ = by_torchao(values, "rceil")
    assert ours.scales.float().item() == 2.0**-7
    assert scales.float().item() == 2.0**-8


def test_dequantizing_gives_every_element_times_every_scale() -> None:
    elements = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = elements[~elements.float().isnan()]
    data = torch.cat([finite, finite[:2]]).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(-1, 1).expand(256, 8).contiguous()
    blocks = BlockScaled(data, scales.view(torch.float8_e8m0fnu), -1)
    exact = data.double() * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None]
    exact[255] = NAN
    torch.testing.assert_close(blocks.dequantize(), exact.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        blocks.dequantize(torch.bfloat16), exact.bfloat16(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantizing_equals_torchaos(dtype: torch.dtype) -> None:
    for values in (torch.randn(64, 96), wide_range(0)):
        blocks = quantize(values, -1)
        expected = to_dtype(blocks.data, blocks.scales, torch.float8_e4m3fn, 32, dtype)
        assert torch.equal(blocks.dequantize(dtype), expected)
        assert torch.equal(blocks.mT.dequantize(dtype), expected.mT)


@pytest.mark.parametrize("dim", [-1, -2])
def test_quantizing_what_was_dequantized_changes_nothing(dim: Any) -> None:
    blocks = quantize(torch.randn(4, 64, 96), dim)
    again = quantize(blocks.dequantize(), dim)
    assert torch.equal(again.dequantize(), blocks.dequantize())


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 20))
def test_swizzled_scales_are_torchaos_and_come_back(num_rows: int, num_columns: int) -> None:
    scales = torch.randint(0, 255, (num_rows, num_columns), dtype=torch.uint8)
    scales = scales.view(torch.float8_e8m0fnu)
    tiles = swizzle(scales)
    assert torch.equal(bytes_of(tiles), bytes_of(to_blocked(scales.view(torch.uint8)).flatten()))
    assert torch.equal(bytes_of(unswizzle(tiles, num_rows, num_columns)), bytes_of(scales))


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 128)])
def test_blocks_with_swizzled_scales_have_the_same_values(shape: tuple[int, ...]) -> None:
    blocks = quantize(torch.randn(shape), -1)
    flat = blocks.scales.view(-1, blocks.scales.shape[-1])
    swizzled = BlockScaled(blocks.data, swizzle(flat), -1, is_swizzled=True)
    assert torch.equal(swizzled.dequantize(), blocks.dequantize())
    assert torch.equal(swizzled.mT.dequantize(), blocks.dequantize().mT)
    if len(shape) == 3:
        assert torch.equal(swizzled[1].dequantize(), blocks[1].dequantize())


@pytest.mark.parametrize(
    ("values", "dim", "rounding", "message"),
    [
        (torch.zeros(32, 40), -1, "rceil", r"dim -1 of shape \(32, 40\) must be a multiple of 32"),
        (torch.zeros(40, 32), -2, "rceil", r"dim -2 of shape \(40, 32\) must be a multiple of 32"),
        (torch.zeros(32), -1, "rceil", "matrices"),
        (torch.zeros(32, 32, dtype=torch.int32), -1, "rceil", "floating-point"),
        (torch.zeros(32, 32), 0, "rceil", "dim must be -1 or -2"),
        (torch.zeros(32, 32), -1, "up", "rounding must be one of"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    values: torch.Tensor, dim: Any, rounding: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(values, dim, rounding)
