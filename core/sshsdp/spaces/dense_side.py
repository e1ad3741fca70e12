"""The runtime side of an address space of plain elements: parameters view the gather output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sshsdp.parameters.reads import Reads
from sshsdp.spaces.flat_buffer import FlatBuffer
from sshsdp.spaces.runtime_side import RuntimeSide

if TYPE_CHECKING:
    from sshsdp.comm.collectives import GatherPart
    from sshsdp.comm.topology import Topology
    from sshsdp.layout.address_space import AddressSpace

__all__ = ["DenseSide"]


class DenseSide(RuntimeSide):
    """Plain elements: parameters are views of the gather output.

    Attributes:
        shard: The runtime shard.
        gathered: The gather output; with one shard, the runtime shard itself.
    """

    def __init__(self, layout: AddressSpace, dtype: torch.dtype, topology: Topology) -> None:
        """Allocate the shard and the gather output."""
        super().__init__(layout, dtype, topology)
        self.shard = torch.empty(layout.shard_numel, dtype=dtype, device=topology.device)
        self.gathered = (
            FlatBuffer.over(self.shard)
            if topology.num_shards == 1
            else FlatBuffer(layout.numel, dtype, topology.device)
        )

    @property
    def element_dtype(self) -> torch.dtype:
        """See `RuntimeSide.element_dtype`."""
        return self.dtype

    @property
    def shard_nbytes(self) -> int:
        """See `RuntimeSide.shard_nbytes`."""
        return self.shard.nbytes

    @property
    def gathered_nbytes(self) -> int:
        """See `RuntimeSide.gathered_nbytes`."""
        return self.gathered.nbytes if self.gathered.is_allocated else 0

    @property
    def slice(self) -> torch.Tensor:
        """The part of the runtime shard that this rank updates."""
        return self.shard[self.slice_start : self.slice_stop]

    def view(self, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """See `RuntimeSide.view`."""
        return self.gathered.view(start, shape, stride)

    def parts_to_gather(self, reads: Reads) -> list[GatherPart]:
        """See `RuntimeSide.parts_to_gather`. Forward and backward read the same bytes."""
        if self.gathered.is_allocated:
            return []
        self.gathered.allocate()
        return [(self.gathered.flat, self.shard)]

    def parts_to_refresh(self, reads: Reads) -> list[GatherPart]:
        """See `RuntimeSide.parts_to_refresh`."""
        is_stale, self._stale = bool(self._stale), Reads.NOTHING
        return [(self.shard, self.slice)] if is_stale else []

    def free(self) -> None:
        """See `RuntimeSide.free`."""
        self.gathered.free()

    def free_what_only_forward_reads(self) -> None:
        """See `RuntimeSide.free_what_only_forward_reads`: both directions read the same bytes."""

    def publish(self, masters: torch.Tensor) -> int:
        """See `RuntimeSide.publish`: one cast."""
        target = self.slice
        if self.topology.is_offloaded:
            # Cast on the host: fewer bytes go up, and from pinned memory they do not block.
            host = torch.empty(masters.shape, dtype=self.dtype, pin_memory=True)
            masters = host.copy_(masters)
        target.copy_(masters, non_blocking=True)
        return target.nbytes

    def write(self, shard: torch.Tensor) -> None:
        """See `RuntimeSide.write`."""
        if shard is not self.shard:
            self.shard.copy_(shard)

    def values(self) -> torch.Tensor:
        """See `RuntimeSide.values`: the runtime shard itself."""
        return self.shard

    def published(self, masters: torch.Tensor) -> torch.Tensor:
        """See `RuntimeSide.published`."""
        return masters.to(self.dtype)

    def written_values(self) -> torch.Tensor:
        """See `RuntimeSide.written_values`: the gather output itself."""
        return self.gathered.flat
