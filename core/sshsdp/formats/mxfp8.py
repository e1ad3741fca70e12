"""The MXFP8 format: what its buffers are, where they may be cut, and how they are written.

An address space in MXFP8 has four *sections*, each with this rank's shard and a gather output of
its own. Scales lie at 1/32 of their elements' places, so the address arithmetic is the same::

    elements         |   q_proj   |   k_proj  |      o_proj      |pad|     N
    rowwise data     |............|...........|..................|   |     N bytes     forward
    rowwise scales   |.|.|..|                                              N / 32      forward
    columnwise data  |............|...........|..................|   |     N bytes     backward
    columnwise scales|.|.|..|                                              N / 32      backward

*Rowwise* and *columnwise* are said of the parameter as the model sees it: a matrix that is stored
transposed has its rowwise blocks along the columns of the stored matrix.

Example:
    >>> MXFP8Format().cuts((4096, 14336)).unit // 14336
    32
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from sshsdp.formats.mxfp8_blocks import (
    BLOCK,
    DATA_DTYPE,
    SCALE_DTYPE,
    BlockScaled,
    ScaleRounding,
    quantize,
)
from sshsdp.formats.mxfp8_scales import TILE_ROWS, swizzle
from sshsdp.layout.address_space import Region
from sshsdp.layout.cuts import Cuts, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from sshsdp.layout.pieces import Piece

__all__ = [
    "COMPUTE_DTYPES",
    "Backend",
    "FlatBlocks",
    "MXFP8Format",
    "Orientation",
    "blocks_of",
    "write_piece",
]

Backend = Literal["auto", "te", "torch", "emulation"]
Orientation = Literal["rowwise", "columnwise"]

# What activations around products in MXFP8 may be; products for float64 are emulated.
COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# Elements quantized at once: temporaries stay in the caches of a CPU and small on an accelerator.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass(frozen=True, kw_only=True)
class MXFP8Format:
    """Weights of linear layers in MXFP8: E4M3 elements, one E8M0 scale per 32, both orientations.

    Attributes:
        rounding: How a block's scale follows from its largest magnitude, named as in torchao.
            ``"rceil"`` is NVIDIA's recipe, ``"floor"`` the OCP specification's.
        backend: Who multiplies. ``"auto"`` takes the first of Transformer Engine, torch's block
            scaled ``scaled_mm`` and emulation (dequantize, then an ordinary product) that the
            device can run; the log says which.
    """

    rounding: ScaleRounding = "rceil"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names.

        Raises:
            ValueError: ``rounding`` or ``backend`` is none of the choices.
        """
        for name, choices in (("rounding", ScaleRounding), ("backend", Backend)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ValueError(
                    f"MXFP8Format.{name} must be one of {get_args(choices)}, got {value!r}"
                )

    @staticmethod
    def why_not(shape: tuple[int, ...]) -> str | None:
        """Why a parameter of this shape cannot be in MXFP8, or None."""
        if len(shape) not in (2, 3):
            return f"{len(shape)}-D: only matrices and batches of matrices have blocks"
        if any(size % BLOCK for size in shape[-2:]) or 0 in shape:
            return f"both of its last dims must be multiples of {BLOCK}, and are {shape[-2:]}"
        return None

    @staticmethod
    def cuts(shape: tuple[int, ...], num_rows: int = BLOCK) -> Cuts:
        """Where shards may cut a parameter: between groups of ``num_rows`` full rows or columns.

        Args:
            shape: A shape that `why_not` has nothing against.
            num_rows: 32 for the format's sake; 128 where rowwise scales are swizzled at publish,
                which also rules out storing the parameter transposed.
        """
        return rows(shape, num_rows, may_transpose=num_rows == BLOCK)

    @property
    def alignment(self) -> int:
        """Elements at whose multiples regions and shards start: scales are 16-byte aligned too."""
        return 16 * BLOCK

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one orientation: what one gather moves."""
        return 1 + 1 / BLOCK


class FlatBlocks(NamedTuple):
    """One orientation's two sections, or a range of them that holds whole blocks.

    Attributes:
        data: 1-D, `DATA_DTYPE`.
        scales: 1-D, `SCALE_DTYPE`, one for 32 elements of ``data``.
    """

    data: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> FlatBlocks:
        """Sections of zeros, for ``numel`` elements."""
        return cls(
            torch.zeros(numel, dtype=torch.uint8, device=device).view(DATA_DTYPE),
            torch.zeros(numel // BLOCK, dtype=torch.uint8, device=device).view(SCALE_DTYPE),
        )

    def range(self, start: int, stop: int) -> FlatBlocks:
        """The part for the elements ``[start, stop)``: views."""
        return FlatBlocks(self.data[start:stop], self.scales[start // BLOCK : stop // BLOCK])


def blocks_of(
    region: Region,
    orientation: Orientation,
    view_data: Callable[[int, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    view_scales: Callable[[int, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    *,
    is_swizzled: bool = False,
) -> BlockScaled:
    """A parameter as blocks over gathered sections: views, no copy.

    Args:
        region: Its place in the address space.
        orientation: Which sections.
        view_data: ``(start, shape, stride)`` to a tensor over the data section.
        view_scales: The same over the scales section.
        is_swizzled: The scales were swizzled at publish (see `write_piece`).
    """
    dim: Literal[-1, -2] = -1 if orientation == "rowwise" else -2
    shape = list(region.shape)
    shape[dim] //= BLOCK
    scales = Region(
        name=region.name,
        start=region.start // BLOCK,
        shape=tuple(shape),
        transposed=region.transposed,
    )
    place = (scales.shape, scales.stride)
    if is_swizzled:
        place = ((math.prod(scales.shape),), (1,))
    return BlockScaled(
        view_data(region.start, region.shape, region.stride),
        view_scales(scales.start, *place),
        dim,
        is_swizzled=is_swizzled,
    )


def write_piece(
    values: torch.Tensor,
    piece: Piece,
    rounding: ScaleRounding,
    rowwise: FlatBlocks,
    columnwise: FlatBlocks,
    *,
    swizzles_rowwise: bool = False,
) -> None:
    """Quantize the part of a parameter that one shard holds, both ways.

    Writes the bits that quantizing the whole parameter would put there.

    Args:
        values: 1-D, the piece's values in storage order.
        piece: Which part it is; cut at 32 full stored rows.
        rounding: See `MXFP8Format`.
        rowwise: The sections' ranges for the piece.
        columnwise: Likewise.
        swizzles_rowwise: Write the rowwise scales in the tiles that GEMMs read (`swizzle`). Asks
            for cuts at 128 full rows and for dims that are multiples of 128.
    """
    assert not (swizzles_rowwise and piece.transposed), piece
    width = piece.shape[-2] if piece.transposed else piece.shape[-1]
    band = (TILE_ROWS if swizzles_rowwise else BLOCK) * width
    assert piece.start % band == 0 and piece.numel % band == 0, piece
    along, across = (columnwise, rowwise) if piece.transposed else (rowwise, columnwise)
    chunk = max(_CHUNK.get(values.device.type, _CHUNK["cuda"]) // band, 1) * band
    for start in range(0, piece.numel, chunk):
        stop = min(start + chunk, piece.numel)
        matrix = values[start:stop].view(-1, width)
        _write_matrix(matrix, -1, rounding, along.range(start, stop), swizzles_rowwise)
        _write_matrix(matrix, -2, rounding, across.range(start, stop), False)


def _write_matrix(
    matrix: torch.Tensor,
    dim: Literal[-1, -2],
    rounding: ScaleRounding,
    target: FlatBlocks,
    swizzles: bool,
) -> None:
    height, width = matrix.shape
    shape = (height, width // BLOCK) if dim == -1 else (height // BLOCK, width)
    out = BlockScaled(target.data.view(height, width), target.scales.view(shape), dim)
    quantize(matrix, dim, rounding, out=out)
    if swizzles:
        target.scales.view(torch.uint8).copy_(swizzle(out.scales).view(torch.uint8))
