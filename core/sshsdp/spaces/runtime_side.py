"""The runtime side of an address space: this rank's runtime shard and the gather output.

A `RuntimeSide` knows one runtime format. `ShardedSpace` tells it when to gather and what to publish
and does not look at its bytes; what a parameter reads are views of the gather output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from sshsdp.parameters.reads import Reads

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sshsdp.comm.collectives import GatherPart
    from sshsdp.comm.topology import Topology
    from sshsdp.layout.address_space import AddressSpace

__all__ = ["RuntimeSide"]


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
