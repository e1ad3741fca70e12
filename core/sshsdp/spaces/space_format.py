"""What the parameters of one address space have in common: how their runtime side is made.

Parameters share an address space if they are trained or frozen alike and have equal space formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sshsdp.layout.cuts import Cuts, elements
from sshsdp.layout.unit_plan import alignment_of
from sshsdp.spaces.dense_side import DenseSide
from sshsdp.spaces.mxfp8_side import BlockSide

if TYPE_CHECKING:
    import torch

    from sshsdp.comm.topology import Topology
    from sshsdp.formats.mxfp8 import MXFP8Format
    from sshsdp.formats.mxfp8_gemm import GemmBackend
    from sshsdp.layout.address_space import AddressSpace
    from sshsdp.spaces.runtime_side import RuntimeSide

__all__ = ["BlockSpaceFormat", "DenseSpaceFormat", "SpaceFormat"]


class SpaceFormat(Protocol):
    """A runtime format with everything that it needs to know; hashable."""

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters pass for."""

    @property
    def alignment(self) -> int:
        """Elements at whose multiples regions and shards start."""

    def cuts(self, shape: tuple[int, ...]) -> Cuts:
        """Where shards may cut a parameter of this shape."""

    def make(self, layout: AddressSpace, topology: Topology) -> RuntimeSide:
        """The runtime side of a space that is laid out like this."""


@dataclass(frozen=True)
class DenseSpaceFormat:
    """Plain elements of one dtype."""

    dtype: torch.dtype

    @property
    def alignment(self) -> int:
        """See `SpaceFormat.alignment`."""
        return alignment_of(self.dtype)

    def cuts(self, shape: tuple[int, ...]) -> Cuts:
        """See `SpaceFormat.cuts`: anywhere."""
        return elements()

    def make(self, layout: AddressSpace, topology: Topology) -> RuntimeSide:
        """See `SpaceFormat.make`."""
        return DenseSide(layout, self.dtype, topology)


@dataclass(frozen=True)
class BlockSpaceFormat:
    """MXFP8, run by one backend.

    Attributes:
        dtype: What the parameters pass for.
        runtime_format: The format.
        backend: Who multiplies.
    """

    dtype: torch.dtype
    runtime_format: MXFP8Format
    backend: GemmBackend

    @property
    def alignment(self) -> int:
        """See `SpaceFormat.alignment`."""
        return self.runtime_format.alignment

    def cuts(self, shape: tuple[int, ...]) -> Cuts:
        """See `SpaceFormat.cuts`: between 32 full rows or columns."""
        return self.runtime_format.cuts(shape)

    def make(self, layout: AddressSpace, topology: Topology) -> RuntimeSide:
        """See `SpaceFormat.make`."""
        return BlockSide(
            layout,
            self.dtype,
            topology,
            runtime_format=self.runtime_format,
            backend=self.backend,
            swizzled=frozenset(),
        )
