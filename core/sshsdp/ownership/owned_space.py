"""An address space whose update parameters are whole matrices, each on one rank.

The runtime side is that of any other space. Its update shard holds the matrices that this rank
owns, one behind the other, each in its own shape; `MatrixExchange` moves gradients to the owners
and new values back.

::

    reduced shard --exchange--> owner's .grad --optimizer--> master --exchange--> runtime shard
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sshsdp.ownership.fragments import fragments_of, pieces_of
from sshsdp.spaces.dense_side import DenseSide
from sshsdp.spaces.space import ShardedSpace, UpdateTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sshsdp.comm.topology import Topology
    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.layout.pieces import Piece
    from sshsdp.ownership.fragments import Fragment
    from sshsdp.parameters.slots import PackSlot, ParameterSlot

    _ByOwner = dict[tuple[int, int], list[tuple["OwnedMatrix", Fragment]]]

__all__ = ["Exchange", "OwnedMatrix", "OwnedSpace", "OwnedTensor", "is_owned"]


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """A matrix and where it is updated.

    Attributes:
        unit: The box of a parameter that it is.
        slot: The parameter.
        owner: ``(row, column)`` of the mesh; row 0 if every replica updates everything.
    """

    unit: OptimizationUnit
    slot: ParameterSlot
    owner: tuple[int, int]

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The matrix as a box of a tensor of the parameter's shape: a view, in ``unit.sizes``."""
        for dim, (start, size) in enumerate(zip(self.unit.offsets, self.unit.sizes, strict=True)):
            values = values.narrow(dim, start, size)
        return values


class Exchange(Protocol):
    """Moves gradients to owners and values back (`sshsdp.ownership.exchange`)."""

    def add_gradient(self, space: OwnedSpace, shard: torch.Tensor) -> None:
        """Take a reduced runtime shard, to be sent to the owners."""

    def publish(self, spaces: Sequence[OwnedSpace]) -> None:
        """Bring new values from their owners into the runtime shards."""

    def gather_owned(
        self, space: OwnedSpace, flat: torch.Tensor
    ) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """What every owner holds, laid out like its update shard."""


class OwnedTensor(UpdateTensor):
    """An update tensor that is one whole matrix.

    Attributes:
        matrix: Which.
    """

    def __init__(self, tensor: torch.Tensor, start: int, matrix: OwnedMatrix) -> None:
        """Bind a view of the update shard to its matrix."""
        super().__init__(tensor, start, [matrix.slot])
        self.matrix = matrix

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its parameter."""
        return self.matrix.unit.sizes == self.matrix.slot.shape


class OwnedSpace(ShardedSpace):
    """The tensors of an address space with owned matrices.

    Attributes:
        mesh: How update state is divided (`topology` is as the runtime side sees it).
        matrices: All of them, in the order of their regions.
        mine: Those of this rank, each with its start in the update shard.
        exchange: Moves gradients and values.
    """

    def __init__(
        self,
        source: ShardedSpace,
        slots: Sequence[ParameterSlot],
        packs: Sequence[PackSlot],
        order: Mapping[ParameterSlot, int],
        matrices: Sequence[OwnedMatrix],
        exchange: Exchange,
    ) -> None:
        """Take parameters over from another space; `take` gives the values.

        Args:
            source: The space they were in, whose formats stay.
            slots: The parameters.
            packs: Packs of theirs.
            order: Parameters with a lower value come first, as far as packs allow.
            matrices: What they consist of.
            exchange: Moves gradients and values.
        """
        self.mesh: Topology = source.mesh if isinstance(source, OwnedSpace) else source.topology
        self.exchange = exchange
        self.matrices = list(matrices)
        # Every replica gets the new values of its whole runtime shard.
        topology = dataclasses.replace(self.mesh, update_sharding="replicated")
        layout = source._plan(slots, packs, order, topology)
        settings: dict[str, Any] = {**source._settings, "topology": topology}
        super().__init__(layout, slots, packs=packs, **settings)

    def sibling(
        self,
        slots: Sequence[ParameterSlot],
        packs: Sequence[PackSlot],
        order: Mapping[ParameterSlot, int],
    ) -> ShardedSpace:
        """See `ShardedSpace.sibling`: one with flat update shards again."""
        settings: dict[str, Any] = {**self._settings, "topology": self.mesh}
        layout = self._plan(slots, packs, order, self.mesh)
        return ShardedSpace(layout, slots, packs=packs, **settings)

    @property
    def place_on_mesh(self) -> tuple[int, int]:
        """This rank as an owner."""
        return self.mesh.update_slice, self.mesh.gather.rank

    def owned_by(self, owner: tuple[int, int]) -> list[tuple[int, OwnedMatrix]]:
        """The matrices of some rank, each with its start in that rank's update shard."""
        found, start = [], 0
        for matrix in self.matrices:
            if matrix.owner == owner:
                found.append((start, matrix))
                start += matrix.unit.numel
        return found

    def _shared_slice(self) -> torch.Tensor | None:
        # A matrix is no part of the runtime shard.
        return None

    def _make_update_shard(self) -> torch.Tensor:
        self.matrices.sort(key=lambda m: (self.layout.by_name[m.slot.name].start, m.unit.offsets))
        self.mine = self.owned_by(self.place_on_mesh)
        self._fragments: dict[int, _ByOwner] = {}
        numel = sum(matrix.unit.numel for _, matrix in self.mine)
        return self._host_or_device_buffer(numel, self.update_dtype)

    def make_update_tensors(self, members: Iterable[ParameterSlot]) -> list[UpdateTensor]:
        """Leaves over the matrices of some parameters that this rank owns."""
        chosen = set(members)
        made: list[UpdateTensor] = []
        for start, matrix in self.mine:
            if matrix.slot in chosen:
                flat = self.update_shard[start : start + matrix.unit.numel]
                leaf = flat.view(matrix.unit.shape).detach().requires_grad_(True)
                made.append(OwnedTensor(leaf, start, matrix))
        return made

    # Pieces

    def update_pieces(
        self, values: torch.Tensor | None = None
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """See `ShardedSpace.update_pieces`."""
        shard = self.update_shard if values is None else values
        for start, matrix in self.mine:
            for piece in pieces_of(matrix.unit, matrix.slot.shape, start):
                yield piece, shard[piece.offset : piece.offset + piece.numel]

    def pieces_of(self, update: UpdateTensor) -> Iterable[Piece]:
        """See `ShardedSpace.pieces_of`."""
        assert isinstance(update, OwnedTensor)
        return pieces_of(update.matrix.unit, update.matrix.slot.shape, 0)

    def fragments(self, shard: int) -> _ByOwner:
        """What lies in one runtime shard, by owner and in the order of the regions."""
        if shard not in self._fragments:
            bounds = self.layout.shard_range(shard)
            found: _ByOwner = {}
            for matrix in self.matrices:
                for fragment in fragments_of(matrix.unit, matrix.slot.region, *bounds):
                    found.setdefault(matrix.owner, []).append((matrix, fragment))
            self._fragments[shard] = found
        return self._fragments[shard]

    # Values

    @property
    def transfer_dtype(self) -> torch.dtype:
        """Dtype in which new values travel: the runtime dtype, or the masters' to be encoded."""
        return self.runtime_dtype if isinstance(self.runtime, DenseSide) else self.update_dtype

    def publish(self) -> None:
        """See `ShardedSpace.publish`. Collective."""
        self.exchange.publish([self])

    def target(self) -> torch.Tensor:
        """Where new values of the runtime shard go, in `transfer_dtype`; then `finish_publish`."""
        if isinstance(self.runtime, DenseSide):
            return self.runtime.shard
        return torch.zeros(
            self.layout.shard_numel, dtype=self.update_dtype, device=self.topology.device
        )

    def finish_publish(self, target: torch.Tensor) -> None:
        """The new values are in ``target``: have them in the runtime format."""
        if isinstance(self.runtime, DenseSide):
            self.stats.publish_bytes += self.runtime.shard_nbytes
        else:
            self.stats.publish_bytes += self.runtime.publish(target)

    def take(self, values: torch.Tensor) -> None:
        """See `ShardedSpace.take`. Local: the runtime shard is written from ``values`` too."""
        with torch.no_grad():
            for start, matrix in self.mine:
                part = matrix.of(self.view_of(matrix.slot, values))
                self.update_shard[start : start + matrix.unit.numel].view(part.shape).copy_(part)
            start, stop = self.layout.shard_range(self.topology.gather.rank)
            target = self.target()
            target.copy_(values[start:stop])
            self.finish_publish(target)

    def scatter(self, values: torch.Tensor | None) -> None:
        """See `ShardedSpace.scatter`: every rank sees all values for a moment."""
        device = self.topology.device
        if values is None:
            values = torch.empty(self.layout.numel, dtype=self.update_dtype, device=device)
        self.topology.world.broadcast(values, self.unit_name)
        self.take(values)

    def collect(self, source: torch.Tensor | None = None) -> torch.Tensor:
        """See `ShardedSpace.collect`."""
        flat = self.update_shard if source is None else source
        flat = flat.to(self.topology.device)
        values = torch.zeros(self.layout.numel, dtype=flat.dtype, device=flat.device)
        with torch.no_grad():
            for owner, its_flat in self.exchange.gather_owned(self, flat):
                for start, matrix in self.owned_by(owner):
                    part = matrix.of(self.view_of(matrix.slot, values))
                    part.copy_(its_flat[start : start + matrix.unit.numel].view(part.shape))
        return values

    def take_changes(self) -> None:
        """See `ShardedSpace.take_changes`. Collective: what the owners see is published."""
        with torch.no_grad():
            written = self.runtime.written_values()
            for start, matrix in self.mine:
                master = self.update_shard[start : start + matrix.unit.numel]
                found = matrix.of(self.view_of(matrix.slot, written)).reshape(-1)
                found = found.to(master.device)
                is_changed = found != self.runtime.published(master)
                master.copy_(torch.where(is_changed, found.to(master.dtype), master))
        self.publish()

    # Gradients

    def _reduce_over_replicas(self, shard: torch.Tensor) -> None:
        self.exchange.add_gradient(self, shard)

    def accept_gradients(self, flat: torch.Tensor) -> None:
        """Take averaged gradients, laid out like the update shard, in the reduce dtype."""
        flat = flat.to(device=self.update_shard.device, dtype=self.update_dtype)
        for update in self.update_tensors:
            part = flat[update.start : update.stop].view(update.tensor.shape)
            if update.tensor.grad is None:
                update.tensor.grad = part
            else:
                update.tensor.grad.add_(part)


def is_owned(slot: ParameterSlot) -> bool:
    """Whether a parameter is updated as whole matrices."""
    return isinstance(slot.space, OwnedSpace)
