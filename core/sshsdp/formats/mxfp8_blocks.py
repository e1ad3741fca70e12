"""MXFP8 blocks: 32 values that share one scale, and the functions that make and read them.

Elements are E4M3 (``torch.float8_e4m3fn``), scales E8M0 (``torch.float8_e8m0fnu``: a power of two).
A matrix is cut into blocks along its last dim (*rowwise*: what a GEMM that sums over the last dim
needs) or along the dim before it (*columnwise*)::

    rowwise, dim -1                    columnwise, dim -2
    | 32 | 32 | 32 |  scales           |  |  |  |        scales [rows / 32, columns]
    | 32 | 32 | 32 |  [rows, columns   |32|32|32| ...
    | 32 | 32 | 32 |      / 32]        |  |  |  |

Both orientations keep the data in the matrix's own order, so 32 full rows are one contiguous range
of the data and of the scales, whichever way the blocks lie.

Note: quantization is exact arithmetic. A block's scale and elements depend on its 32 values only,
not on where they stand in the tensor or on the device, because scales are computed from the bits of
the largest magnitude. This is why quantizing parts that are cut at 32 full rows gives the bits of
quantizing the whole. (A scale computed as ``ceil(log2(x))`` in floating point, as torchao's eager
``rceil`` does, is one too small for x a few units in the last place above a power of two; the
hardware instruction, and so torchao compiled for it, rounds up as this module does.)

Example:
    >>> weight = torch.randn(64, 96)
    >>> blocks = quantize(weight, dim=-1)
    >>> blocks.scales.shape
    torch.Size([64, 3])
    >>> (blocks.dequantize() - weight).abs().max() < weight.abs().max() / 16
    tensor(True)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from sshsdp.formats.mxfp8_scales import unswizzle

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BLOCK", "DATA_DTYPE", "SCALE_DTYPE", "BlockScaled", "ScaleRounding", "quantize"]

BLOCK = 32
DATA_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float8_e8m0fnu

ScaleRounding = Literal["rceil", "floor", "ceil", "even"]

_MAX = 448.0  # largest E4M3 value, 1.75 * 2 ** 8
_MAX_EXPONENT = 8
_ELEMENT_MANTISSA_BITS = 3
_BIAS = 127
_LARGEST_SCALE, _NAN_SCALE = 254, 255
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1


@dataclass(frozen=True)
class BlockScaled:
    """A matrix (or a batch of them) in MXFP8.

    Attributes:
        data: Elements, ``[..., rows, columns]``.
        scales: ``[..., rows, columns / 32]`` if ``dim`` is -1, ``[..., rows / 32, columns]`` if -2.
        dim: The dim along which 32 elements share a scale.
        is_swizzled: The scales are a matrix's (or a batch's, one after another) in the 1-D order of
            `sshsdp.formats.mxfp8_scales.swizzle`, with the blocks' dim last.
    """

    data: torch.Tensor
    scales: torch.Tensor
    dim: Literal[-1, -2]
    is_swizzled: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the data."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scales.nbytes

    @property
    def mT(self) -> BlockScaled:
        """The transposed matrix: a view."""
        scales = self.scales if self.is_swizzled else self.scales.mT
        return BlockScaled(self.data.mT, scales, -1 if self.dim == -2 else -2, self.is_swizzled)

    def __getitem__(self, index: int) -> BlockScaled:
        """One matrix of a batch: a view."""
        scales = self.scales.view(len(self.data), -1) if self.is_swizzled else self.scales
        return BlockScaled(self.data[index], scales[index], self.dim, self.is_swizzled)

    def plain(self) -> BlockScaled:
        """The same with scales in the matrix's own order."""
        if not self.is_swizzled:
            return self
        if self.data.ndim > 2:
            each = [self[index].plain().scales for index in range(len(self.data))]
            return BlockScaled(self.data, torch.stack(each), self.dim)
        num_rows, num_columns = self.shape if self.dim == -1 else self.data.mT.shape
        scales = unswizzle(self.scales, num_rows, num_columns // BLOCK)
        return BlockScaled(self.data, scales if self.dim == -1 else scales.mT, self.dim)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, exact in bfloat16 and wider (save for magnitudes below their range).

        A block whose scale is NaN is all NaN. An element is expected to be NaN in such blocks only,
        as `quantize` writes them.
        """
        if not self.data.is_contiguous() and self.data.mT.is_contiguous():
            return self.mT.dequantize(dtype).mT
        scales = self.plain().scales
        values = _decode(self.data) if self.data.is_cpu else self.data.float()
        _blocked(values, self.dim).mul_(scales.float().unsqueeze(self.dim))
        return values.to(dtype)


@torch.no_grad()
def quantize(
    values: torch.Tensor,
    dim: Literal[-1, -2],
    rounding: ScaleRounding = "rceil",
    *,
    out: BlockScaled | None = None,
) -> BlockScaled:
    """Quantize to MXFP8.

    Args:
        values: ``[..., rows, columns]``, floating point; dim ``dim`` a multiple of 32.
        dim: Along which dim to form blocks: -1 (rowwise) or -2 (columnwise).
        rounding: How a block's scale is chosen from its largest magnitude, as torchao names it.
            ``rceil`` (NVIDIA's recipe): the smallest power of two with which nothing saturates.
            ``floor``: as the OCP MX specification says; what lies above 448 times the scale
            saturates. ``ceil``: ``floor`` of the magnitude rounded up to a power of two. ``even``:
            ``floor`` of the magnitude rounded to E4M3's three mantissa bits.
        out: Where to write; contiguous or strided, of the right shapes.

    Returns:
        The blocks. A block that holds a NaN gets a NaN scale. One that holds an infinity (and no
        NaN) gets a finite scale, and the infinity saturates to plus or minus 448.

    Raises:
        ValueError: A shape that cannot be cut into blocks, or an unknown rounding mode.
    """
    _check(values, dim, rounding)
    if values.dtype == torch.float64:
        values = values.float()
    blocks = _blocked(values, dim)
    largest = blocks.abs().amax(dim, keepdim=True).float()
    exponents = _EXPONENTS[rounding](largest)
    # Before torch 2.12 a cast does not saturate.
    inverse = _inverses(rounding, values.device)[exponents]
    scaled = torch.mul(blocks, inverse).clamp_(-_MAX, _MAX).reshape(values.shape)
    scales = exponents.squeeze(dim).to(torch.uint8)
    if out is None:
        return BlockScaled(scaled.to(DATA_DTYPE), scales.view(SCALE_DTYPE), dim)
    out.data.copy_(scaled)
    out.scales.view(torch.uint8).copy_(scales)
    return out


def _check(values: torch.Tensor, dim: int, rounding: str) -> None:
    if rounding not in _EXPONENTS:
        raise ValueError(f"rounding must be one of {get_args(ScaleRounding)}, got {rounding!r}")
    if dim not in (-1, -2):
        raise ValueError(f"dim must be -1 or -2, got {dim}")
    if values.ndim < 2 or not values.is_floating_point():
        raise ValueError(
            "MXFP8 takes floating-point matrices or batches of them, got "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if values.shape[dim] % BLOCK:
        raise ValueError(
            f"dim {dim} of shape {tuple(values.shape)} must be a multiple of {BLOCK}: "
            "pad it, or keep the tensor in a dense format"
        )


def _blocked(values: torch.Tensor, dim: int) -> torch.Tensor:
    """A view with one dim more, in which dim ``dim`` runs through a block."""
    return torch.unflatten(values, dim, (-1, BLOCK))


# Biased exponents (the bytes of E8M0 scales, as int32) from the blocks' largest magnitudes.


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def _rounded_up(bits: torch.Tensor) -> torch.Tensor:
    """Exponent field of a magnitude rounded up to a power of two."""
    return (bits >> _MANTISSA_BITS) + (bits & _MANTISSA).ne(0)


def _below_largest_element(exponents: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Scale that brings powers of two to E4M3's largest one."""
    scales = (exponents - _MAX_EXPONENT).clamp_(min=0)
    return scales.masked_fill_(largest.isnan(), _NAN_SCALE)


def _floor(largest: torch.Tensor) -> torch.Tensor:
    return _below_largest_element(_bits(largest) >> _MANTISSA_BITS, largest)


def _ceil(largest: torch.Tensor) -> torch.Tensor:
    return _below_largest_element(_rounded_up(_bits(largest)), largest)


def _even(largest: torch.Tensor) -> torch.Tensor:
    half = 1 << (_MANTISSA_BITS - _ELEMENT_MANTISSA_BITS - 1)
    return _below_largest_element((_bits(largest) + half) >> _MANTISSA_BITS, largest)


def _rceil(largest: torch.Tensor) -> torch.Tensor:
    ratio = largest / _MAX
    bits = _bits(ratio)
    # Below 2 ** -126 a mantissa is a fraction of that, and its upper half rounds up.
    subnormal = bits.gt(1 << (_MANTISSA_BITS - 1)).int()
    scales = torch.where(bits < (1 << _MANTISSA_BITS), subnormal, _rounded_up(bits))
    return scales.clamp_(max=_LARGEST_SCALE).masked_fill_(ratio.isnan(), _NAN_SCALE)


@functools.cache
def _inverses(rounding: str, device: torch.device) -> torch.Tensor:
    """What a block is multiplied with, by the byte of its scale. Ends as in torchao."""
    with torch.inference_mode(False):
        table = torch.exp2(_BIAS - torch.arange(256, dtype=torch.float64)).float()
    if rounding == "rceil":
        table[0], table[_NAN_SCALE] = 1.0, torch.nan
    else:
        table[0], table[_NAN_SCALE] = 2.0 ** (_BIAS - 1), 0.0
    return table.to(device)


def _decode(data: torch.Tensor) -> torch.Tensor:
    """Elements as float32. On CPUs a cast takes ten times as long.

    E4M3's exponent and mantissa, moved to the places of float16's, make the value / 256, subnormals
    included.
    """
    bits = data.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).float().mul_(256)


_EXPONENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rceil": _rceil,
    "floor": _floor,
    "ceil": _ceil,
    "even": _even,
}
