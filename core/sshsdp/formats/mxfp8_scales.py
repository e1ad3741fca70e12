"""The order in which block-scaled GEMMs of sm_100 and newer read scales.

cuBLAS takes the scales of an ``[rows, columns / 32]`` matrix in tiles of 128 rows and 4 columns,
512 bytes each, tile after tile along a row of tiles. Inside a tile, row ``32 * i + j`` lies at
16-byte line ``j``, in its ``i``-th group of four. Rows and columns beyond the matrix are zeros.

A band of 128 full rows is thus a contiguous range. Of a parameter that is only cut at such bands,
and whose dims are multiples of 128, each rank can write its part of the tiled scales at publish;
other scales are brought into tiles after the gather, which moves 1/32 byte per element.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "swizzle", "unswizzle"]

TILE_ROWS, TILE_COLUMNS = 128, 4
_LINES, _GROUPS = 32, 4


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Bring scales into tiles.

    Args:
        scales: ``[rows, columns / 32]``, one byte each.

    Returns:
        1-D, padded to whole tiles, contiguous.
    """
    num_rows, num_columns = scales.shape
    padding = (0, -num_columns % TILE_COLUMNS, 0, -num_rows % TILE_ROWS)
    padded = functional.pad(scales.view(torch.uint8), padding)
    grid = (-(-num_rows // TILE_ROWS), -(-num_columns // TILE_COLUMNS))
    tiles = padded.contiguous().view(grid[0], _GROUPS, _LINES, grid[1], TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle(tiles: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """The ``[num_rows, num_columns]`` scales that `swizzle` brought into tiles."""
    grid = (-(-num_rows // TILE_ROWS), -(-num_columns // TILE_COLUMNS))
    lines = tiles.view(torch.uint8).view(*grid, _LINES, _GROUPS, TILE_COLUMNS)
    padded = lines.permute(0, 3, 2, 1, 4).reshape(grid[0] * TILE_ROWS, grid[1] * TILE_COLUMNS)
    return padded[:num_rows, :num_columns].contiguous().view(tiles.dtype)
