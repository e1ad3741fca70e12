"""The runtime side of an address space in MXFP8: four sections, gathered two at a time.

::

                       runtime shard      gather output
    rowwise data       | N / S bytes  |-->| N bytes    |   forward
    rowwise scales     | N / 32 S     |-->| N / 32     |   forward
    columnwise data    | N / S        |-->| N          |   backward
    columnwise scales  | N / 32 S     |-->| N / 32     |   backward

Each is gathered into an output of its own: one interleaved buffer would have to be copied apart.
Publish quantizes this rank's masters into all four, both orientations in one call.

Parameters have the shape, dtype and strides that a dense space would give them, over a buffer that
has no memory (the *stand-in*); products read the sections. Only ``unsharded(writes=True)`` fills
the stand-in, so that dense values can be written into it.

Note: frozen parameters are what was quantized. They have no masters. Their rowwise blocks are made
from the given values, and the columnwise ones from the values of those, so that a checkpoint, which
holds these values, brings the same blocks back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from sshsdp.formats.mxfp8 import FlatBlocks, blocks_of, write_piece
from sshsdp.formats.mxfp8_blocks import BLOCK, DATA_DTYPE, SCALE_DTYPE, BlockScaled
from sshsdp.parameters.quantized import QuantizedParameter
from sshsdp.parameters.reads import Reads
from sshsdp.spaces.flat_buffer import FlatBuffer
from sshsdp.spaces.runtime_side import RuntimeSide

if TYPE_CHECKING:
    from torch import nn

    from sshsdp.comm.collectives import GatherPart
    from sshsdp.comm.topology import Topology
    from sshsdp.formats.mxfp8 import MXFP8Format, Orientation
    from sshsdp.formats.mxfp8_gemm import GemmBackend
    from sshsdp.layout.address_space import AddressSpace, Region
    from sshsdp.layout.pieces import Piece

__all__ = ["BlockSide"]

_READ_BY: dict[Orientation, Reads] = {"rowwise": Reads.FORWARD, "columnwise": Reads.BACKWARD}


@dataclass(frozen=True)
class _Section:
    """Bytes of one kind.

    Attributes:
        shard: This rank's part, 1-D ``uint8``.
        gathered: Everybody's.
        block: Elements of the address space for one byte.
    """

    shard: torch.Tensor
    gathered: FlatBuffer
    block: int

    @classmethod
    def of(cls, layout: AddressSpace, block: int, topology: Topology) -> _Section:
        # Zeros: padding is sent too.
        shard = torch.zeros(layout.shard_numel // block, dtype=torch.uint8, device=topology.device)
        if topology.num_shards == 1:
            return cls(shard, FlatBuffer.over(shard), block)
        return cls(shard, FlatBuffer(layout.numel // block, torch.uint8, topology.device), block)

    def range(self, start: int, stop: int) -> torch.Tensor:
        return self.shard[start // self.block : stop // self.block]


class BlockSide(RuntimeSide):
    """Runtime shard and gather output in MXFP8.

    Attributes:
        runtime_format: Its rounding.
        backend: Who multiplies.
        swizzled: Parameters whose rowwise scales publish writes in the order that GEMMs read.
    """

    splits_reads: ClassVar[bool] = True

    def __init__(
        self,
        layout: AddressSpace,
        dtype: torch.dtype,
        topology: Topology,
        *,
        runtime_format: MXFP8Format,
        backend: GemmBackend,
        swizzled: frozenset[str],
    ) -> None:
        """Allocate the sections."""
        super().__init__(layout, dtype, topology)
        self.runtime_format = runtime_format
        self.backend = backend
        self.swizzled = swizzled
        self._sections: dict[Orientation, tuple[_Section, _Section]] = {
            orientation: (
                _Section.of(layout, 1, topology),
                _Section.of(layout, BLOCK, topology),
            )
            for orientation in _READ_BY
        }
        self._stand_in = FlatBuffer(layout.numel, dtype, topology.device)
        self._is_dense = False
        self._blocks: dict[tuple[Region, Orientation], BlockScaled] = {}

    @property
    def element_dtype(self) -> torch.dtype:
        """See `RuntimeSide.element_dtype`."""
        return DATA_DTYPE

    @property
    def parameter_class(self) -> type[nn.Parameter] | None:
        """See `RuntimeSide.parameter_class`."""
        return None if self._is_dense else QuantizedParameter

    @property
    def shard_nbytes(self) -> int:
        """See `RuntimeSide.shard_nbytes`."""
        return sum(section.shard.nbytes for section in self._all_sections(Reads.BOTH))

    @property
    def gathered_nbytes(self) -> int:
        """See `RuntimeSide.gathered_nbytes`."""
        sections = self._all_sections(Reads.BOTH)
        buffers = [self._stand_in, *(section.gathered for section in sections)]
        return sum(buffer.nbytes for buffer in buffers if buffer.is_allocated)

    def _all_sections(self, reads: Reads) -> list[_Section]:
        return [
            section
            for orientation, needed in _READ_BY.items()
            if needed in reads
            for section in self._sections[orientation]
        ]

    def view(self, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """See `RuntimeSide.view`: over the stand-in."""
        return self._stand_in.view(start, shape, stride)

    def blocks(self, region: Region, orientation: Orientation) -> BlockScaled:
        """A parameter's (or a pack's) blocks: views of the gather outputs, which must be there."""
        key = (region, orientation)
        if key not in self._blocks:
            data, scales = (section.gathered for section in self._sections[orientation])
            self._blocks[key] = blocks_of(
                region,
                orientation,
                lambda *place: data.view(*place).view(DATA_DTYPE),
                lambda *place: scales.view(*place).view(SCALE_DTYPE),
                is_swizzled=orientation == "rowwise" and region.name in self.swizzled,
            )
        return self._blocks[key]

    def parts_to_gather(self, reads: Reads) -> list[GatherPart]:
        """See `RuntimeSide.parts_to_gather`: the sections of one orientation, or of both."""
        parts = []
        for section in self._all_sections(reads):
            if not section.gathered.is_allocated:
                section.gathered.allocate()
                parts.append((section.gathered.flat, section.shard))
        return parts

    def parts_to_refresh(self, reads: Reads) -> list[GatherPart]:
        """See `RuntimeSide.parts_to_refresh`."""
        stale = self._stale & reads
        self._stale &= ~stale
        return [
            (section.shard, section.range(self.slice_start, self.slice_stop))
            for section in self._all_sections(stale)
        ]

    def free(self) -> None:
        """See `RuntimeSide.free`."""
        for section in self._all_sections(Reads.BOTH):
            section.gathered.free()
        self._stand_in.free()
        self._is_dense = False

    def free_what_only_forward_reads(self) -> None:
        """See `RuntimeSide.free_what_only_forward_reads`: the rowwise sections."""
        for section in self._all_sections(Reads.FORWARD):
            section.gathered.free()

    # Writing

    def publish(self, masters: torch.Tensor) -> int:
        """See `RuntimeSide.publish`: quantizes both ways, on the masters' device."""
        sections = self._all_sections(Reads.BOTH)
        targets = [section.range(self.slice_start, self.slice_stop) for section in sections]
        written = targets
        if self.topology.is_offloaded:
            written = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=True) for t in targets]
        begin = self.layout.shard_range(self.topology.gather.rank)[0] + self.slice_start
        self._quantize(masters, begin, written)
        if self.topology.is_offloaded:
            for target, source in zip(targets, written, strict=True):
                target.copy_(source, non_blocking=True)
        return sum(target.nbytes for target in targets)

    def write(self, shard: torch.Tensor) -> None:
        """See `RuntimeSide.write`."""
        begin = self.layout.shard_range(self.topology.gather.rank)[0]
        targets = [section.shard for section in self._all_sections(Reads.BOTH)]
        self._quantize(shard, begin, targets)
        self._quantize(self.values(), begin, targets)

    def _quantize(self, values: torch.Tensor, begin: int, targets: list[torch.Tensor]) -> None:
        """Quantize ``[begin, begin + numel)`` of the space into that range of the four sections."""
        rowwise = FlatBlocks(targets[0].view(DATA_DTYPE), targets[1].view(SCALE_DTYPE))
        columnwise = FlatBlocks(targets[2].view(DATA_DTYPE), targets[3].view(SCALE_DTYPE))
        for piece in self.layout.pieces(begin, begin + values.numel()):
            place = (piece.offset, piece.offset + piece.numel)
            write_piece(
                values[slice(*place)],
                piece,
                self.runtime_format.rounding,
                rowwise.range(*place),
                columnwise.range(*place),
                swizzles_rowwise=piece.name in self.swizzled,
            )

    # Dense values

    def values(self) -> torch.Tensor:
        """See `RuntimeSide.values`: the rowwise blocks' values; padding is zero."""
        values = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.topology.device)
        for piece in self.layout.pieces(*self.layout.shard_range(self.topology.gather.rank)):
            part = values[piece.offset : piece.offset + piece.numel]
            part.copy_(self._piece(piece).dequantize(self.dtype).view(-1))
        return values

    def _piece(self, piece: Piece) -> BlockScaled:
        """The rowwise blocks of this rank's piece of a parameter, in storage order."""
        data, scales = (
            section.range(piece.offset, piece.offset + piece.numel)
            for section in self._sections["rowwise"]
        )
        width = piece.shape[-2] if piece.transposed else piece.shape[-1]
        elements = data.view(DATA_DTYPE).view(-1, width)
        typed = scales.view(SCALE_DTYPE)
        if piece.name in self.swizzled:
            return BlockScaled(elements, typed, -1, is_swizzled=True)
        if piece.transposed:
            return BlockScaled(elements, typed.view(-1, width), -2)
        return BlockScaled(elements, typed.view(-1, width // BLOCK), -1)

    def published(self, masters: torch.Tensor) -> torch.Tensor:
        """See `RuntimeSide.published`."""
        return self.values()[self.slice_start : self.slice_stop].to(masters.device)

    def show_dense(self) -> None:
        """See `RuntimeSide.show_dense`: fill the stand-in."""
        self._stand_in.allocate()
        self._stand_in.flat.zero_()
        for region in self.layout.regions:
            target = self._stand_in.view(region.start, region.shape, region.stride)
            target.copy_(self.blocks(region, "rowwise").dequantize(self.dtype))
        self._is_dense = True

    def written_values(self) -> torch.Tensor:
        """See `RuntimeSide.written_values`: the stand-in."""
        return self._stand_in.flat
