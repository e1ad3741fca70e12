"""Every collective of the engine, with its group, its bytes and an optional recording.

A `Collectives` object speaks over one mesh axis. Bytes are counted as they cross the wire *into
this rank*: ``(n - 1) / n`` of the whole buffer for an all-gather or a reduce-scatter over ``n``
ranks.

On gloo, whose native all-gather and reduce-scatter run at less than half the speed of its
point-to-point sends, both are built from those: an all-gather receives every other shard straight
into its slot of the output, and a reduce-scatter receives the other ranks' contributions and sums
them in rank order (deterministic). ``SSHSDP_NATIVE_COLLECTIVES=1`` forces the backend's own ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CollectiveRecord", "Collectives", "GatherPart", "Pending", "WireBytes"]

# The output of an all-gather and this rank's shard, both 1-D.
GatherPart = tuple[torch.Tensor, torch.Tensor]

_native_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_native_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One issued collective, for tests and reports.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``, ...
        axis: Mesh axis.
        label: What was moved, usually a unit name.
        nbytes: Bytes of the whole (unsharded) buffer.
    """

    kind: str
    axis: str
    label: str
    nbytes: int


@dataclass(slots=True)
class WireBytes:
    """Bytes received by this rank and number of calls, by kind of collective."""

    calls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        """Count one call."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.nbytes[kind] = self.nbytes.get(kind, 0) + nbytes


class Pending:
    """A collective in flight; `wait` returns when its result may be used, however often called."""

    def __init__(self, works: list[dist.Work], finish: Callable[[], None] | None = None) -> None:
        """Hold the backend's handles and what is to be done once they are through."""
        self._works = works
        self._finish = finish

    @property
    def is_through(self) -> bool:
        """Whether `wait` is known not to block."""
        # Gloo's point-to-point works say so only after they were waited for.
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait (on CUDA: make the current stream wait) and finish."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Collectives:
    """Collectives over one process group, one mesh axis.

    Args:
        group: The process group; one rank per shard, in mesh order.
        axis: Name of the mesh axis, ``"shard"`` or ``"replicate"``.
        device: Device of the buffers.
        wire: Where bytes are counted.
    """

    def __init__(
        self, group: dist.ProcessGroup, axis: str, device: torch.device, wire: WireBytes
    ) -> None:
        self.group = group
        self.axis = axis
        self.size = group.size()
        self.rank = group.rank()
        self.wire = wire
        self.recording: list[CollectiveRecord] | None = None
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        native = os.environ.get("SSHSDP_NATIVE_COLLECTIVES", "0") == "1"
        self._point_to_point = (
            device.type == "cpu" and "gloo" in str(dist.get_backend(group)) and not native
        )
        self._is_on_cpu = device.type == "cpu"
        # gloo has no group of all-gathers of different dtypes.
        self._coalesces = device.type == "cuda"

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: str) -> Pending:
        """Write the concatenation of all ranks' ``shard`` (1-D) into ``output``.

        ``shard`` may be this rank's own slot of ``output``.
        """
        return self.all_gather_together([(output, shard)], label)

    def all_gather_together(self, parts: Sequence[GatherPart], label: str) -> Pending:
        """Several all-gathers, issued as one group where the backend can."""
        for output, shard in parts:
            self._count("all_gather", label, output, output.nbytes - shard.nbytes)
        if self.size > 1 and not self._point_to_point:
            return Pending(self._native_all_gathers(parts))
        outputs = [output.view(self.size, -1) for output, _ in parts]
        shards = [shard for _, shard in parts]
        for output, shard in zip(outputs, shards, strict=True):
            if output[self.rank].data_ptr() != shard.data_ptr():
                output[self.rank].copy_(shard)
        return Pending(
            self._exchange(lambda peer: shards, lambda peer: [slots[peer] for slots in outputs])
        )

    def _native_all_gathers(self, parts: Sequence[GatherPart]) -> list[dist.Work]:
        if len(parts) == 1 or not self._coalesces:
            return [
                _native_all_gather(output, shard, group=self.group, async_op=True)
                for output, shard in parts
            ]
        with dist.distributed_c10d._coalescing_manager(self.group, async_ops=True) as manager:
            for output, shard in parts:
                _native_all_gather(output, shard, group=self.group, async_op=True)
        works: list[dist.Work] = manager.works
        return works

    def reduce_scatter(
        self, source: torch.Tensor, label: str, finish: Callable[[torch.Tensor], None]
    ) -> Pending:
        """Sum ``source`` (1-D) over the ranks; ``finish`` gets this rank's slot of the sum.

        ``source`` must not be written or freed before the result has been waited for. The tensor
        that ``finish`` gets is its own to keep.
        """
        self._count("reduce_scatter", label, source, source.nbytes // self.size * (self.size - 1))
        slots = source.view(self.size, -1)
        if self.size == 1:
            return Pending([], lambda: finish(slots[0]))
        if not self._point_to_point:
            output = torch.empty_like(slots[self.rank])
            work = _native_reduce_scatter(output, source, group=self.group, async_op=True)
            return Pending([work], lambda: finish(output))
        received = {peer: torch.empty_like(slots[peer]) for peer in self._peers}
        works = self._exchange(lambda peer: [slots[peer]], lambda peer: [received[peer]])

        def sum_in_rank_order() -> None:
            # Floating-point sums depend on their order: rank order is the same on every run. The
            # first two terms may be swapped without a change, which lets a received buffer hold the
            # sum.
            terms = [received.get(rank, slots[rank]) for rank in range(self.size)]
            total = terms[0] if self.rank != 0 else terms[1]
            total.add_(terms[1] if self.rank != 0 else terms[0])
            for term in terms[2:]:
                total.add_(term)
            finish(total)

        return Pending(works, sum_in_rank_order)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        label: str,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """Reduce ``tensor`` over the ranks, in place; then call ``finish``."""
        # A ring all-reduce brings each rank (n - 1) / n of the buffer twice.
        self._count("all_reduce", label, tensor, 2 * tensor.nbytes * (self.size - 1) // self.size)
        if self.size == 1:
            return Pending([], finish)
        return Pending([dist.all_reduce(tensor, op=op, group=self.group, async_op=True)], finish)

    def all_to_all(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        label: str,
        nbytes: int,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """Send ``outgoing[r]`` to every rank r and receive ``incoming[r]`` from it.

        The tensors are contiguous and may differ in size; an empty one is not sent. What a rank has
        for itself stays where it is.

        Args:
            outgoing: One tensor for each rank; must not be written before the result is there.
            incoming: One tensor for each rank.
            label: What is moved.
            nbytes: Size of the whole, to be recorded.
            finish: Called once everything is there.
        """
        received = [incoming[peer] for peer in self._peers]
        self._record("all_to_all", label, nbytes, sum(tensor.nbytes for tensor in received))
        if self.size == 1:
            return Pending([], finish)
        if not self._is_on_cpu:
            # A rank's own part is sent too: an empty one costs nothing.
            mine = outgoing[self.rank].new_empty(0)
            sent = [mine if r == self.rank else tensor for r, tensor in enumerate(outgoing)]
            into = [mine if r == self.rank else tensor for r, tensor in enumerate(incoming)]
            work: Any = dist.all_to_all(into, sent, group=self.group, async_op=True)
            return Pending([work], finish)
        operations = [
            dist.P2POp(direction, tensor, group=self.group, group_peer=peer)
            for peer in self._peers
            for direction, tensor in ((dist.isend, outgoing[peer]), (dist.irecv, incoming[peer]))
            if tensor.numel()
        ]
        return Pending(dist.batch_isend_irecv(operations) if operations else [], finish)

    def scatter(self, shard: torch.Tensor, source: torch.Tensor | None, label: str) -> None:
        """Give every rank its slot of rank 0's ``source`` (1-D; None on the other ranks)."""
        self._count("scatter", label, shard, shard.nbytes if self.rank else 0)
        if self.size == 1:
            assert source is not None
            shard.copy_(source)
            return
        slots = list(source.view(self.size, -1)) if source is not None and self.rank == 0 else None
        dist.scatter(shard, slots, group=self.group, group_src=0)

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        """Overwrite ``tensor`` with rank 0's."""
        self._count("broadcast", label, tensor, tensor.nbytes if self.rank else 0)
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def _exchange(
        self,
        outgoing: Callable[[int], Sequence[torch.Tensor]],
        incoming: Callable[[int], Sequence[torch.Tensor]],
    ) -> list[dist.Work]:
        operations = [
            dist.P2POp(direction, tensor, group=self.group, group_peer=peer)
            for peer in self._peers
            for sent, received in zip(outgoing(peer), incoming(peer), strict=True)
            for direction, tensor in ((dist.isend, sent), (dist.irecv, received))
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _count(self, kind: str, label: str, whole: torch.Tensor, received: int) -> None:
        self._record(kind, label, whole.nbytes, received)

    def _record(self, kind: str, label: str, nbytes: int, received: int) -> None:
        self.wire.add(f"{self.axis}/{kind}", received)
        if self.recording is not None:
            self.recording.append(CollectiveRecord(kind, self.axis, label, nbytes))
