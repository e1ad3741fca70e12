"""MXFP8 products through ``torch.nn.functional.scaled_mm``, on sm_100 and newer.

cuBLAS reads scales in tiles (`mxfp8_scales`). Weights whose scales were not swizzled at publish,
activations and gradients get theirs swizzled here, one byte per 32 elements.

Not run on hardware yet: written against torch 2.13's sources and documentation.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from sshsdp.formats.mxfp8_blocks import quantize
from sshsdp.formats.mxfp8_emulation import Emulation
from sshsdp.formats.mxfp8_gemm import GemmBackend, put
from sshsdp.formats.mxfp8_scales import TILE_COLUMNS, TILE_ROWS, swizzle

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_blocks import BlockScaled, ScaleRounding

__all__ = ["TorchScaled"]

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (10, 0)
# From here on, cuBLAS multiplies MXFP8 matrices with the summed dim contiguous only.
_TN_ONLY_CAPABILITY = (12, 0)


class TorchScaled(GemmBackend):
    """Block-scaled products of torch."""

    name = "torch"
    reads_swizzled = True
    group_rows = TILE_ROWS

    @staticmethod
    def why_not(device: torch.device, rounding: ScaleRounding) -> str | None:
        """Needs an NVIDIA GPU of compute capability 10.0."""
        if device.type != "cuda" or torch.version.hip is not None:
            return "needs an NVIDIA GPU"
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_CAPABILITY:
            return f"needs compute capability 10.0, and the GPU has {capability}"
        return None

    def product(self, left: BlockScaled, right: BlockScaled, dtype: torch.dtype) -> torch.Tensor:
        """See `GemmBackend.product`."""
        a, b, scales_a, scales_b = self._operands(left, right)
        recipe, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
        return functional.scaled_mm(
            a,
            b,
            scales_a,
            recipe,
            scales_b,
            recipe,
            swizzle_a=order,
            swizzle_b=order,
            output_dtype=dtype,
        )

    def write_product(
        self, target: torch.Tensor, left: BlockScaled, right: BlockScaled, *, accumulate: bool
    ) -> None:
        """See `GemmBackend.write_product`. ``scaled_mm`` itself cannot accumulate."""
        if accumulate or not target.is_contiguous():
            put(target, self.product(left, right, target.dtype), accumulate=accumulate)
            return
        a, b, scales_a, scales_b = self._operands(left, right)
        recipe = [functional.ScalingType.BlockWise1x32.value]
        order = [functional.SwizzleType.SWIZZLE_32_4_4.value]
        torch.ops.aten._scaled_mm_v2.out(
            a,
            b,
            [scales_a],
            recipe,
            order,
            [scales_b],
            recipe,
            order,
            None,
            target.dtype,
            out=target,
        )

    def grouped_product(
        self, left: BlockScaled, right: BlockScaled, ends: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `GemmBackend.grouped_product`. Groups end at multiples of 128 rows."""
        if not _runs_grouped(left.data.device):
            return Emulation().grouped_product(left, right, ends, dtype)
        # Whole tiles of rows per group: the tiles of all groups are the tiles of the matrix.
        scales = swizzled_scales(left).view(len(left.data), -1)
        return _scaled_grouped_mm(left, right, scales, swizzled_scales(right), ends).to(dtype)

    def write_grouped_product(
        self,
        target: torch.Tensor,
        left: BlockScaled,
        right: BlockScaled,
        ends: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """See `GemmBackend.write_grouped_product`. The kernel's result is bfloat16."""
        if not _runs_grouped(left.data.device):
            Emulation().write_grouped_product(target, left, right, ends, accumulate=accumulate)
            return
        scales = [
            tiles_by_group(swizzled_scales(side), len(side.data), ends) for side in (left, right)
        ]
        product = _scaled_grouped_mm(left, right, scales[0], scales[1], ends)
        put(target, product, accumulate=accumulate)

    @staticmethod
    def _operands(left: BlockScaled, right: BlockScaled) -> tuple[torch.Tensor, ...]:
        a, b = left.data, right.data
        if torch.cuda.get_device_capability(a.device) >= _TN_ONLY_CAPABILITY:
            a, b = a.contiguous(), b.contiguous()
        return a, b.mT, swizzled_scales(left), swizzled_scales(right)


def swizzled_scales(blocks: BlockScaled) -> torch.Tensor:
    """The scales in tiles, with the blocks' dim last: 1-D, or ``[matrices, -1]`` of a batch."""
    along = blocks if blocks.dim == -1 else blocks.mT
    if along.data.ndim > 2:
        if along.is_swizzled:
            return along.scales.view(len(along.data), -1)
        return torch.stack([swizzle(scales) for scales in along.scales])
    return along.scales if along.is_swizzled else swizzle(along.scales)


def tiles_by_group(tiles: torch.Tensor, num_rows: int, ends: torch.Tensor) -> torch.Tensor:
    """Regroup a matrix's tiled scales by column group: each group's tiles as a matrix of their own.

    ::

        tiles of the matrix   row of tiles 0: |a|a|b|b|b|   row of tiles 1: |A|A|B|B|B|
        by group              |a|a|A|A|  |b|b|b|B|B|B|

    Args:
        tiles: From `swizzle`.
        num_rows: Rows of the matrix.
        ends: Where each group's elements end, in multiples of 128.

    Returns:
        ``[rows, columns / 32]``, both rounded up to whole tiles, as the grouped kernel asks for.
    """
    height = -(-num_rows // TILE_ROWS)
    grid = tiles.view(torch.uint8).view(height, -1, TILE_ROWS * TILE_COLUMNS)
    num_columns = grid.shape[1]
    stops = ends // TILE_ROWS
    column = torch.arange(num_columns, device=tiles.device)
    # Columns behind the last group are padding; they stay behind.
    group = torch.searchsorted(stops, column, right=True)
    bounds = torch.cat([stops.new_zeros(1), stops, stops.new_full((1,), num_columns)])
    start, width = bounds[group], (bounds[1:] - bounds[:-1])[group]
    row = torch.arange(height, device=tiles.device)[:, None]
    place = start * height + row * width + (column - start)
    grouped = torch.empty_like(grid.reshape(-1, grid.shape[-1]))
    grouped[place.reshape(-1)] = grid.reshape(-1, grid.shape[-1])
    return grouped.view(tiles.dtype).view(height * TILE_ROWS, num_columns * TILE_COLUMNS)


def _scaled_grouped_mm(
    left: BlockScaled,
    right: BlockScaled,
    scales_left: torch.Tensor,
    scales_right: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    recipe, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    # The kernel reads both operands with the summed dim contiguous.
    multiply: Any = functional.scaled_grouped_mm  # type: ignore[attr-defined]  # not in the stubs
    product: torch.Tensor = multiply(
        left.data.contiguous(),
        right.data.contiguous().mT,
        scales_left,
        recipe,
        scales_right,
        recipe,
        swizzle_a=order,
        swizzle_b=order,
        offs=ends.int(),
        output_dtype=torch.bfloat16,
    )
    return product


@functools.cache
def _runs_grouped(device: torch.device) -> bool:
    """Whether this build of torch has the grouped kernel: nothing but trying tells."""
    values = torch.zeros(TILE_ROWS, TILE_ROWS, dtype=torch.float32, device=device)
    rows, batch = quantize(values, -1), quantize(values[None], -1)
    ends = torch.full((1,), TILE_ROWS, device=device, dtype=torch.int32)
    try:
        scales = swizzled_scales(rows).view(TILE_ROWS, -1)
        _scaled_grouped_mm(rows, batch, scales, swizzled_scales(batch), ends)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        logger.warning("MXFP8 grouped products on %s run by emulation: %s", device, error)
        return False
    return True
