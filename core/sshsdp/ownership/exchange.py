"""Moving gradients to the owners of matrices, and their new values back.

Spaces are moved in buckets, in an order that is the same on every rank. On an R x S mesh, matrices
belong to a row (a replica group) and, in it, to one rank. This rank holds runtime shard ``s``::

    gradients   to the row   over replicate: each rank sends every row that row's part of shard s
                             and sums the R contributions; (R - 1) / R of the shard arrive
                to the rank  over shard: the S parts of each matrix meet on its owner
    new values  in the row   over shard: owners send each rank its parts, in the runtime format
                to all rows  over replicate: each rank sends every row what its own row updated

So nothing crosses the slow axis that the all-reduce of classic HSDP would not have sent. The
collectives have process groups of their own: gradients leave while backward goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sshsdp.comm.collectives import Pending
from sshsdp.comm.topology import REPLICATE, SHARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sshsdp.comm.collectives import Collectives
    from sshsdp.comm.topology import Topology
    from sshsdp.ownership.fragments import Fragment
    from sshsdp.ownership.owned_space import OwnedMatrix, OwnedSpace

__all__ = ["MatrixExchange"]

# Spaces are moved together until their parts of a runtime shard have this many bytes.
_BUCKET_BYTES = 1 << 25

Owner = tuple[int, int]


@dataclass
class _Bucket:
    """Spaces whose matrices are moved together.

    Attributes:
        spaces: In order; a space that is reduced twice in a backward is there twice.
        shards: Reduced shards (gradients), or where new values go.
        dtype: Of what is moved.
    """

    dtype: torch.dtype
    spaces: list[OwnedSpace] = field(default_factory=list)
    shards: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the whole spaces, the same on every rank."""
        return sum(space.layout.numel for space in self.spaces) * self.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        """Of this rank's shards."""
        return sum(space.layout.shard_numel for space in self.spaces) * self.dtype.itemsize

    @property
    def label(self) -> str:
        """The units, for a recording."""
        return "+".join(dict.fromkeys(space.unit_name for space in self.spaces))

    def parts(self, shard: int, owner: Owner) -> Iterator[tuple[int, OwnedMatrix, Fragment]]:
        """``(index of the space, matrix, fragment)`` of one owner in one runtime shard."""
        for index, space in enumerate(self.spaces):
            for matrix, fragment in space.fragments(shard).get(owner, ()):
                yield index, matrix, fragment

    def numel(self, shard: int, owner: Owner) -> int:
        """Elements of one owner in one runtime shard."""
        return sum(fragment.numel for *_, fragment in self.parts(shard, owner))


class MatrixExchange:
    """Moves what belongs to owned matrices between the ranks of a mesh."""

    def __init__(self, topology: Topology) -> None:
        """Make the process groups. Collective."""
        self._topology = topology
        self._shard = topology.more_collectives(SHARD)
        self._replicate = topology.more_collectives(REPLICATE)
        self._num_rows = topology.num_update_slices
        self._row = topology.update_slice
        self._bucket: _Bucket | None = None
        # Buckets on their way to the rows, in order, and what comes after.
        self._to_rows: list[tuple[Pending, Callable[[], Pending]]] = []
        self._to_ranks: list[Pending] = []

    def all(self) -> tuple[Collectives, ...]:
        """Every collectives object, for recording."""
        return self._shard, self._replicate

    @property
    def _column(self) -> int:
        return self._shard.rank

    def _owners_in(self, row: int) -> list[Owner]:
        return [(row, column) for column in range(self._shard.size)]

    # Gradients

    def add_gradient(self, space: OwnedSpace, shard: torch.Tensor) -> None:
        """Take a shard of gradients that is summed over ``shard``; full buckets set off."""
        bucket = self._bucket
        if bucket is not None and bucket.dtype != shard.dtype:
            self._send_to_rows(bucket)
            bucket = None
        if bucket is None:
            bucket = self._bucket = _Bucket(shard.dtype)
        bucket.spaces.append(space)
        bucket.shards.append(shard)
        if bucket.shard_nbytes >= _BUCKET_BYTES:
            self._send_to_rows(bucket)

    def finish_gradients(self) -> None:
        """Have all gradients on their owners, as averages."""
        if self._bucket is not None:
            self._send_to_rows(self._bucket)
        while self._to_rows:
            self._send_to_ranks()
        for pending in self._to_ranks:
            pending.wait()
        self._to_ranks.clear()

    def abandon_gradients(self) -> None:
        """Forget gradients that are on their way (a backward has raised)."""
        self._bucket = None
        for pending in [pending for pending, _ in self._to_rows] + self._to_ranks:
            pending.wait()
        self._to_rows.clear()
        self._to_ranks.clear()

    def _send_to_rows(self, bucket: _Bucket) -> None:
        self._bucket = None
        # One bucket is on its way: what is before it moves on, so that little is held.
        while len(self._to_rows) > 1:
            self._send_to_ranks()
        outgoing = [self._packed(bucket, row) for row in range(self._num_rows)]
        bucket.shards.clear()
        mine = outgoing[self._row]
        if self._num_rows == 1:
            # With sharding="replicated" every row owns everything.
            alone = self._replicate.size == 1
            pending = Pending([]) if alone else self._replicate.all_reduce(mine, bucket.label)
            self._to_rows.append((pending, lambda: self._to_owners(bucket, mine)))
            return
        incoming = [
            mine if row == self._row else torch.empty_like(mine) for row in range(self._num_rows)
        ]
        pending = self._replicate.all_to_all(outgoing, incoming, bucket.label, bucket.nbytes)
        self._to_rows.append((pending, lambda: self._to_owners(bucket, _sum(incoming, self._row))))

    def _packed(self, bucket: _Bucket, row: int) -> torch.Tensor:
        parts = [
            fragment.in_shard(bucket.shards[index]).reshape(-1)
            for owner in self._owners_in(row)
            for index, _, fragment in bucket.parts(self._column, owner)
        ]
        return torch.cat(parts) if parts else bucket.shards[0].new_empty(0)

    def _send_to_ranks(self) -> None:
        pending, following = self._to_rows.pop(0)
        pending.wait()
        self._to_ranks.append(following())

    def _to_owners(self, bucket: _Bucket, total: torch.Tensor) -> Pending:
        total.div_(self._topology.num_shards * self._topology.num_replicas)
        sizes = [bucket.numel(self._column, owner) for owner in self._owners_in(self._row)]
        outgoing = _split(total, sizes)
        me = (self._row, self._column)
        incoming = [
            outgoing[shard] if shard == self._column else total.new_empty(bucket.numel(shard, me))
            for shard in range(self._shard.size)
        ]
        return self._shard.all_to_all(
            outgoing,
            incoming,
            bucket.label,
            bucket.nbytes,
            lambda: self._hand_over(bucket, incoming),
        )

    def _hand_over(self, bucket: _Bucket, incoming: Sequence[torch.Tensor]) -> None:
        me = (self._row, self._column)
        flats = [
            incoming[0].new_empty(sum(matrix.unit.numel for _, matrix in space.mine))
            for space in bucket.spaces
        ]
        places = [_places(space, flat) for space, flat in zip(bucket.spaces, flats, strict=True)]
        for shard, received in enumerate(incoming):
            start = 0
            for index, matrix, fragment in bucket.parts(shard, me):
                part = received[start : start + fragment.numel].view(fragment.sizes)
                fragment.in_matrix(places[index][matrix]).copy_(part)
                start += fragment.numel
        for space, flat in zip(bucket.spaces, flats, strict=True):
            space.accept_gradients(flat)

    # New values

    def publish(self, spaces: Sequence[OwnedSpace]) -> None:
        """Bring the owners' masters into all runtime shards. Collective."""
        with torch.no_grad():
            in_rows = [(bucket, *self._send_in_row(bucket)) for bucket in self._buckets(spaces)]
            to_all = []
            for bucket, pending, values in in_rows:
                pending.wait()
                to_all.append((bucket, *self._send_to_all_rows(bucket, values)))
            for bucket, pending, by_row in to_all:
                pending.wait()
                self._write(bucket, by_row)

    def _buckets(self, spaces: Sequence[OwnedSpace]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        for space in spaces:
            last = buckets[-1] if buckets else None
            if (
                last is None
                or last.dtype != space.transfer_dtype
                or last.shard_nbytes >= _BUCKET_BYTES
            ):
                last = _Bucket(space.transfer_dtype)
                buckets.append(last)
            last.spaces.append(space)
        return buckets

    def _send_in_row(self, bucket: _Bucket) -> tuple[Pending, torch.Tensor]:
        device, me = self._topology.device, (self._row, self._column)
        # Cast where the masters are: fewer bytes go up from a host.
        places = [
            _places(space, space.update_shard.to(bucket.dtype).to(device))
            for space in bucket.spaces
        ]
        outgoing = []
        for shard in range(self._shard.size):
            parts = [
                fragment.in_matrix(places[index][matrix]).reshape(-1)
                for index, matrix, fragment in bucket.parts(shard, me)
            ]
            empty = torch.empty(0, dtype=bucket.dtype, device=device)
            outgoing.append(torch.cat(parts) if parts else empty)
        sizes = [bucket.numel(self._column, owner) for owner in self._owners_in(self._row)]
        values = torch.empty(sum(sizes), dtype=bucket.dtype, device=device)
        incoming = _split(values, sizes)
        incoming[self._column].copy_(outgoing[self._column])
        pending = self._shard.all_to_all(outgoing, incoming, bucket.label, bucket.nbytes)
        return pending, values

    def _send_to_all_rows(
        self, bucket: _Bucket, values: torch.Tensor
    ) -> tuple[Pending, list[torch.Tensor]]:
        by_row = [
            values
            if row == self._row
            else values.new_empty(
                sum(bucket.numel(self._column, owner) for owner in self._owners_in(row))
            )
            for row in range(self._num_rows)
        ]
        if self._num_rows == 1:
            return Pending([]), by_row
        outgoing = [values] * self._num_rows
        pending = self._replicate.all_to_all(outgoing, by_row, bucket.label, bucket.nbytes)
        return pending, by_row

    def _write(self, bucket: _Bucket, by_row: Sequence[torch.Tensor]) -> None:
        targets = [space.target() for space in bucket.spaces]
        for row, values in enumerate(by_row):
            start = 0
            for owner in self._owners_in(row):
                for index, _, fragment in bucket.parts(self._column, owner):
                    part = values[start : start + fragment.numel].view(fragment.sizes)
                    fragment.in_shard(targets[index]).copy_(part)
                    start += fragment.numel
        for space, target in zip(bucket.spaces, targets, strict=True):
            space.finish_publish(target)

    # Whole values

    def gather_owned(
        self, space: OwnedSpace, flat: torch.Tensor
    ) -> Iterator[tuple[Owner, torch.Tensor]]:
        """Every rank's ``flat`` (laid out like its update shard), with its owner. Collective."""
        sizes = {
            owner: sum(matrix.unit.numel for _, matrix in space.owned_by(owner))
            for row in range(self._num_rows)
            for owner in self._owners_in(row)
        }
        nbytes = space.layout.numel * flat.dtype.itemsize
        its_sizes = [sizes[owner] for owner in self._owners_in(self._row)]
        mine = flat.new_empty(sum(its_sizes))
        parts = _split(mine, its_sizes)
        parts[self._column].copy_(flat)
        outgoing = [parts[self._column]] * self._shard.size
        self._shard.all_to_all(outgoing, parts, space.unit_name, nbytes).wait()
        by_row = [
            mine
            if row == self._row
            else flat.new_empty(sum(sizes[owner] for owner in self._owners_in(row)))
            for row in range(self._num_rows)
        ]
        if self._num_rows > 1:
            sent = [mine] * self._num_rows
            self._replicate.all_to_all(sent, by_row, space.unit_name, nbytes).wait()
        for row, values in enumerate(by_row):
            owners = self._owners_in(row)
            yield from zip(owners, _split(values, [sizes[o] for o in owners]), strict=True)


def _places(space: OwnedSpace, flat: torch.Tensor) -> dict[OwnedMatrix, torch.Tensor]:
    """This rank's matrices inside a tensor laid out like its update shard."""
    return {
        matrix: flat[start : start + matrix.unit.numel].view(matrix.unit.sizes)
        for start, matrix in space.mine
    }


def _split(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    split: Any = torch.split
    return [*split(flat, list(sizes))]


def _sum(terms: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """The sum in rank order, whoever computes it, in place of a received term."""
    # The first two may change places without changing the sum.
    first, second = (terms[0], terms[1]) if own != 0 else (terms[1], terms[0])
    total = first.add_(second)
    for term in terms[2:]:
        total.add_(term)
    return total
