"""The runtime side of an address space: this rank's runtime shard and the gather output.

A `RuntimeSide` knows one runtime format. `ShardedSpace` tells it when to gather and what to publish
and does not look at its bytes; what a parameter reads are views of the gather output.

Note: what a gather is for. Some formats read other bytes in forward than in backward. Whoever asks
for parameters says which of the two comes (`Reads`), and gets what is not there yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Flag
from typing import TYPE_CHECKING, ClassVar

import torch

from sshsdp.engine.buffers import FlatBuffer

if TYPE_CHECKING:
    from torch import nn

    from sshsdp.engine.collectives import GatherPart
    from sshsdp.engine.topology import Topology
    from sshsdp.layout.address_space import AddressSpace

__all__ = ["DenseSide", "Reads", "RuntimeSide"]


class Reads(Flag):
    """What parameters are gathered for."""

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2
    BOTH = 3


class RuntimeSide(ABC):
    """Runtime shard and gather output of one address space on this rank.

    Attributes:
        layout: The address space.
        dtype: What the parameters pass for, and the kernels compute in.
        topology: Where the bytes go.
    """

    # Whether forward and backward read different bytes.
    splits_reads: ClassVar[bool] = False

    def __init__(self, layout: AddressSpace, dtype: torch.dtype, topology: Topology) -> None:
        """Take a layout; the subclass allocates."""
        self.layout = layout
        self.dtype = dtype
        self.topology = topology
        numel = layout.shard_numel // topology.num_update_slices
        self.slice_start = topology.update_slice * numel
        self.slice_stop = self.slice_start + numel
        self._stale = Reads.NOTHING

    def mark_replicas_stale(self) -> None:
        """Note that the other replicas have updated their slices of the runtime shard."""
        if self.topology.num_update_slices > 1:
            self._stale = Reads.BOTH

    @property
    def parameter_class(self) -> type[nn.Parameter] | None:
        """The class of a parameter while it is gathered; None: the one that it came with."""
        return None

    @property
    @abstractmethod
    def element_dtype(self) -> torch.dtype:
        """Dtype of the stored elements, which names the format in a layout."""

    @property
    @abstractmethod
    def shard_nbytes(self) -> int:
        """Bytes of the runtime shard."""

    @property
    @abstractmethod
    def gathered_nbytes(self) -> int:
        """Bytes of the gather output that are allocated now."""

    @abstractmethod
    def view(self, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """The data of a parameter: a tensor over the gather output, or what stands for it."""

    @abstractmethod
    def parts_to_gather(self, reads: Reads) -> list[GatherPart]:
        """Allocate what ``reads`` asks for and is not there; returns what has to be gathered."""

    @abstractmethod
    def parts_to_refresh(self, reads: Reads) -> list[GatherPart]:
        """Whole and own slice of what other replicas have updated and ``reads`` asks for."""

    @abstractmethod
    def free(self) -> None:
        """Give the gather output back."""

    @abstractmethod
    def free_what_only_forward_reads(self) -> None:
        """Give back what backward would not read, if that is apart."""

    @abstractmethod
    def publish(self, masters: torch.Tensor) -> int:
        """Write this rank's slice from its update shard; returns the bytes written."""

    @abstractmethod
    def write(self, shard: torch.Tensor) -> None:
        """Write the whole runtime shard from dense values (frozen parameters)."""

    @abstractmethod
    def values(self) -> torch.Tensor:
        """The runtime shard as dense values, 1-D, in `dtype`."""

    @abstractmethod
    def published(self, masters: torch.Tensor) -> torch.Tensor:
        """What publishing this rank's masters has made of them, in `dtype`."""

    def show_dense(self) -> None:  # noqa: B027  # dense ones are shown already
        """Let the gathered parameters be read and written as dense tensors, until `free`."""

    @abstractmethod
    def written_values(self) -> torch.Tensor:
        """The gathered parameters, once shown dense, with what was written into them."""


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
