"""One address space at work: runtime shard, update shard, gather output and reduce input.

::

    update shard (master) --publish--> runtime shard --gather--> full --views--> runtime parameters
    update gradients <--average-- reduce-scatter <-- gradient buffer <--views-- weight gradients

Note: runtime weights have one writer. `ShardedSpace.publish` is the only code that writes the
runtime shard after construction; loading writes the update shard and publishes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from sshsdp.layout.planner import RegionRequest, plan_address_space
from sshsdp.parameters.slots import PackSlot
from sshsdp.spaces.dense_side import DenseSide
from sshsdp.spaces.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sshsdp.comm.collectives import GatherPart, Pending
    from sshsdp.comm.topology import Topology
    from sshsdp.layout.address_space import AddressSpace
    from sshsdp.layout.pieces import Piece
    from sshsdp.parameters.reads import Reads
    from sshsdp.parameters.slots import GradientSlot, ParameterSlot
    from sshsdp.spaces.runtime_side import RuntimeSide
    from sshsdp.spaces.space_format import SpaceFormat
    from sshsdp.stats import Stats

__all__ = ["ShardedSpace", "UpdateTensor", "plan_space", "space_of"]


def space_of(slot: GradientSlot) -> ShardedSpace:
    """The address space that a slot lives in, which it knows by what it asks of it only."""
    assert isinstance(slot.space, ShardedSpace)
    return slot.space


def plan_space(
    slots: Sequence[ParameterSlot],
    packs: Sequence[Sequence[ParameterSlot]],
    order: Mapping[ParameterSlot, int],
    space_format: SpaceFormat,
    *,
    num_shards: int,
    num_update_slices: int,
) -> AddressSpace:
    """Lay out the parameters of one space, cut where their ``cuts`` allow it.

    Args:
        slots: The parameters.
        packs: Groups of them that must be neighbours.
        order: Lower values come first; equal ones should form one range.
        space_format: Decides the alignment, and where shards may be cut.
        num_shards: Size of the ``shard`` axis.
        num_update_slices: Into how many update shards each shard is cut again.
    """
    label = {member: str(index) for index, pack in enumerate(packs) for member in pack}
    members = [member for pack in packs for member in pack]
    ordered = [*members, *(slot for slot in slots if slot not in label)]
    cuts = {slot: slot.cuts.both(space_format.cuts(slot.shape)) for slot in slots}
    return plan_address_space(
        [
            RegionRequest(
                name=slot.name,
                shape=slot.shape,
                order=order[slot],
                cut_unit=cuts[slot].unit,
                transposed_cut_unit=cuts[slot].transposed_unit,
                pack=label.get(slot),
            )
            for slot in (ordered if members else slots)
        ],
        num_shards=num_shards,
        num_update_slices=num_update_slices,
        alignment=math.lcm(space_format.alignment, *(slot.block for slot in slots)),
    )


class UpdateTensor:
    """The part of an update shard that one optimizer tensor covers.

    Attributes:
        tensor: A leaf, a view of the update shard: 1-D, or a whole matrix.
        start: Where it begins inside the update shard.
        slots: The parameters of which it (or its counterpart on another rank) holds elements.
    """

    def __init__(self, tensor: torch.Tensor, start: int, slots: list[ParameterSlot]) -> None:
        """Bind a view of the update shard to its place."""
        self.tensor = tensor
        self.start = start
        self.slots = slots

    @property
    def stop(self) -> int:
        """One past its last element inside the update shard."""
        return self.start + self.tensor.numel()

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced, averaged gradient."""
        return self.tensor.grad


class ShardedSpace:
    """The tensors of one address space of a unit on this rank.

    Attributes:
        runtime: Runtime shard and gather output, in the runtime format.
        update_shard: Masters.
    """

    runtime: RuntimeSide

    def __init__(
        self,
        layout: AddressSpace,
        slots: Sequence[ParameterSlot],
        *,
        unit_name: str,
        trainable: bool,
        space_format: SpaceFormat,
        update_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        topology: Topology,
        stats: Stats,
        packs: Sequence[Sequence[ParameterSlot] | PackSlot] = (),
    ) -> None:
        """Allocate the shards; `scatter` fills them.

        Packs of another space move here, those that are only named are made.
        """
        self.unit_name = unit_name
        self.trainable = trainable
        self.space_format = space_format
        self.runtime_dtype = space_format.dtype
        self.update_dtype = update_dtype if trainable else self.runtime_dtype
        self.reduce_dtype = reduce_dtype
        self.topology = topology
        self.stats = stats
        self.update_tensors: list[UpdateTensor] = []
        self._reducing: Pending | None = None
        self._replicating: Pending | None = None
        self._shown: torch.Tensor | None = None
        self.packs = [
            pack if isinstance(pack, PackSlot) else PackSlot(pack, self) for pack in packs
        ]
        self.place(layout, slots)

    def place(self, layout: AddressSpace, slots: Sequence[ParameterSlot]) -> None:
        """Take a layout: make the shards and the gather output, and point parameters into it."""
        self.layout = layout
        self.slots = [*sorted(slots, key=lambda slot: layout.by_name[slot.name].start)]
        runtime = self.runtime = self.space_format.make(layout, self.topology)
        self.update_start = runtime.slice_start
        self.update_shard = self._make_update_shard()
        self._gradient: FlatBuffer | None = None
        for slot in self.slots:
            slot.space, slot.region = self, layout.by_name[slot.name]
            slot.adopt(runtime.view(slot.region.start, slot.region.shape, slot.region.stride))
        for pack in self.packs:
            pack.space = self
            region = pack.place
            pack.adopt(runtime.view(region.start, region.shape, region.stride))
        runtime.free()

    def _make_update_shard(self) -> torch.Tensor:
        shared = self._shared_slice()
        if shared is not None:
            return shared
        numel = self.runtime.slice_stop - self.runtime.slice_start
        return self._host_or_device_buffer(numel, self.update_dtype)

    def sibling(
        self,
        slots: Sequence[ParameterSlot],
        packs: Sequence[PackSlot],
        order: Mapping[ParameterSlot, int],
    ) -> ShardedSpace:
        """A space of the same unit and formats for some of its parameters, its values not set.

        Args:
            slots: The parameters. They live there from now on.
            packs: Packs of theirs.
            order: Parameters with a lower value come first, as far as packs allow.
        """
        return ShardedSpace(
            self._plan(slots, packs, order, self.topology), slots, packs=packs, **self._settings
        )

    @property
    def format_key(self) -> tuple[object, ...]:
        """Equal for spaces whose parameters could share one."""
        others = ("topology", "stats")
        return tuple(value for key, value in self._settings.items() if key not in others)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "unit_name": self.unit_name,
            "trainable": self.trainable,
            "space_format": self.space_format,
            "update_dtype": self.update_dtype,
            "reduce_dtype": self.reduce_dtype,
            "topology": self.topology,
            "stats": self.stats,
        }

    def _plan(
        self,
        slots: Sequence[ParameterSlot],
        packs: Sequence[PackSlot],
        order: Mapping[ParameterSlot, int],
        topology: Topology,
    ) -> AddressSpace:
        return plan_space(
            slots,
            [pack.members for pack in packs],
            order,
            self.space_format,
            num_shards=topology.num_shards,
            num_update_slices=topology.num_update_slices,
        )

    def rearranged(self, order: Mapping[ParameterSlot, int]) -> AddressSpace:
        """A layout in which parameters with a lower ``order`` come first, as far as packs allow."""
        return self._plan(self.slots, self.packs, order, self.topology)

    @property
    def is_shared(self) -> bool:
        """Whether the update shard is a view of the runtime shard."""
        return self._shared_slice() is not None

    def _shared_slice(self) -> torch.Tensor | None:
        is_same = self.update_dtype == self.runtime_dtype and not self.topology.is_offloaded
        return self.runtime.slice if is_same and isinstance(self.runtime, DenseSide) else None

    def _host_or_device_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Copies between pinned memory and an accelerator do not block.
        topology = self.topology
        return torch.empty(
            numel, dtype=dtype, device=topology.update_device, pin_memory=topology.is_offloaded
        )

    @property
    def update_range(self) -> tuple[int, int]:
        """This rank's update shard as a range of the address space."""
        start = self.layout.shard_range(self.topology.gather.rank)[0] + self.update_start
        return start, start + self.update_shard.numel()

    def update_pieces(
        self, values: torch.Tensor | None = None
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """This rank's pieces of the parameters, each with its 1-D view of the update shard.

        Args:
            values: Views of these instead, which are laid out like the update shard.
        """
        shard = self.update_shard if values is None else values
        for piece in self.layout.pieces(*self.update_range):
            yield piece, shard[piece.offset : piece.offset + piece.numel]

    def runtime_pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """This rank's pieces of the parameters, each with its 1-D view of the runtime values.

        What is written into them counts once `take_loaded_values` is called.
        """
        shard = self._shown = self.runtime.values()
        for piece in self.layout.pieces(*self.layout.shard_range(self.topology.gather.rank)):
            yield piece, shard[piece.offset : piece.offset + piece.numel]

    @property
    def device(self) -> torch.device:
        """Where gathered parameters and gradients live."""
        return self.topology.device

    def has_reduced_gradient(self) -> bool:
        """Whether a reduced gradient waits in the update parameters."""
        return any(update.grad is not None for update in self.update_tensors)

    def count_gradient_copy(self, nbytes: int) -> None:
        """Note that a gradient had to be copied into the buffer."""
        self.stats.gradient_copy_bytes += nbytes

    # Runtime side

    def parts_to_gather(self, reads: Reads) -> list[GatherPart]:
        """What has to be gathered before the parameters can be read, allocated and up to date."""
        self.refresh_replicas(reads)
        return self.runtime.parts_to_gather(reads)

    def refresh_replicas(self, reads: Reads) -> None:
        """Bring the slices that other replicas updated into the runtime shard, in its format."""
        parts = self.runtime.parts_to_refresh(reads)
        if parts:
            self.topology.replicate.all_gather_together(parts, self.unit_name).wait()

    def publish(self) -> None:
        """Write the update shard into the runtime shard, in the runtime format."""
        self._shown = None
        if not self.trainable:
            return
        if not self.is_shared:
            with torch.no_grad():
                self.stats.publish_bytes += self.runtime.publish(self.update_shard)
        self.runtime.mark_replicas_stale()

    def take_loaded_values(self) -> None:
        """Publish masters, or runtime values, that were written from outside."""
        if self._shown is not None:
            with torch.no_grad():
                self.runtime.write(self._shown)
        self.publish()

    # Whole values, for construction, checkpoints and new layouts

    def clear(self) -> None:
        """Have zeros on this rank, padding included."""
        with torch.no_grad():
            if self.trainable:
                self.update_shard.zero_()
                self.publish()
            else:
                self.runtime.write(torch.zeros_like(self.runtime.values()))

    def scatter(self, values: torch.Tensor | None) -> None:
        """Take rank 0's ``values`` (address space order, update dtype; ignored elsewhere)."""
        self._write(self._scatter_shard(values, self.update_dtype))

    def scatter_values(self, values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """This rank's update part of rank 0's ``values`` (address space order), written nowhere."""
        return self._update_part(self._scatter_shard(values, dtype))

    def _scatter_shard(self, values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        topology = self.topology
        shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=topology.device)
        if topology.replicate.rank == 0:
            topology.gather.scatter(shard, values, self.unit_name)
        topology.replicate.broadcast(shard, self.unit_name)
        return shard

    def _update_part(self, shard: torch.Tensor) -> torch.Tensor:
        return shard[self.update_start : self.update_start + self.update_shard.numel()]

    def take(self, values: torch.Tensor) -> None:
        """Take this rank's part of ``values`` (address space order), which every rank has."""
        start, stop = self.layout.shard_range(self.topology.gather.rank)
        self._write(values[start:stop])

    def _write(self, shard: torch.Tensor) -> None:
        with torch.no_grad():
            if self.trainable:
                self.update_shard.copy_(self._update_part(shard))
                self.publish()
            else:
                self.runtime.write(shard)

    def collect(self, source: torch.Tensor | None = None) -> torch.Tensor:
        """All values in address space order: masters, or runtime values of frozen parameters.

        Args:
            source: Collect these instead of the update shard, whose size they have.
        """
        topology, layout = self.topology, self.layout
        if source is None:
            source = self.update_shard if self.trainable else self.runtime.values()
        source = source.to(topology.device)
        if self.trainable and topology.num_update_slices > 1:
            shard = torch.empty(layout.shard_numel, dtype=source.dtype, device=source.device)
            topology.replicate.all_gather(shard, source, self.unit_name).wait()
            source = shard
        values = torch.empty(layout.numel, dtype=source.dtype, device=source.device)
        topology.gather.all_gather(values, source, self.unit_name).wait()
        return values

    def view_of(self, slot: ParameterSlot, values: torch.Tensor) -> torch.Tensor:
        """The parameter inside ``values`` (address space order), in its original shape."""
        return values.as_strided(slot.region.shape, slot.region.stride, slot.region.start)

    def rearrange(self, layout: AddressSpace) -> None:
        """Move all values to another layout of the same parameters. Collective, before training."""
        old = self.collect()
        new = torch.zeros(layout.numel, dtype=old.dtype, device=old.device)
        for slot in self.slots:
            region = layout.by_name[slot.name]
            new.as_strided(region.shape, region.stride, region.start).copy_(self.view_of(slot, old))
        self.place(layout, self.slots)
        self.take(new)

    def take_changes(self) -> None:
        """Take what was written into the gathered parameters: this rank's elements of it.

        Elements that still equal the published value keep their master, which may be more precise.
        """
        start, stop = self.update_range
        with torch.no_grad():
            written = self.runtime.written_values()
            runtime = written[start:stop].to(self.topology.update_device)
            if not self.trainable:
                self.take(written)
            elif self.is_shared:
                self.update_shard.copy_(runtime)
            else:
                is_changed = runtime != self.runtime.published(self.update_shard)
                changed = runtime.to(self.update_dtype)
                self.update_shard.copy_(torch.where(is_changed, changed, self.update_shard))
            self.publish()

    def release(self) -> None:
        """Leave ordinary, whole parameters (the unit must be gathered). Collective."""
        if isinstance(self.runtime, DenseSide):
            values = self.runtime.gathered.flat
        else:
            values = self.collect().to(self.runtime_dtype)
        for slot in self.slots:
            slot.release(self.view_of(slot, values))

    # Gradient side

    def pieces_of(self, update: UpdateTensor) -> Iterable[Piece]:
        """The pieces of parameters in one update tensor, their offsets counted in it."""
        start = self.update_range[0] + update.start
        return self.layout.pieces(start, start + update.tensor.numel())

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """The averaged gradient of one of this rank's pieces."""
        for update in self.update_tensors:
            if update.start <= piece.offset < update.stop and update.grad is not None:
                start = piece.offset - update.start
                return update.grad.reshape(-1)[start : start + piece.numel]
        return None

    def drop_gradients(self) -> None:
        """Forget reduced and unreduced gradients."""
        self.finish_reduction()
        for update in self.update_tensors:
            update.tensor.grad = None
        for slot in self.slots:
            slot.is_written = slot.was_used = False
        if self._gradient is not None:
            self._gradient.free()
            self._gradient = None

    def allocate_gradient(self) -> None:
        """Have a gradient buffer that may be written, its padding zeroed."""
        if self._reducing is not None:
            self.sum_over_shards()
        if self._gradient is not None and self._gradient.is_allocated:
            return
        if self._gradient is None:
            self._gradient = FlatBuffer(self.layout.numel, self.reduce_dtype, self.topology.device)
            for slot in self.slots:
                slot.grad_view = self._gradient.view(
                    slot.region.start, slot.region.shape, slot.region.stride
                )
            for pack in self.packs:
                region = pack.place
                pack.grad_view = self._gradient.view(region.start, region.shape, region.stride)
        self._gradient.allocate()
        # Padding is summed and lies inside flat update parameters: garbage would reach their norms.
        for start, stop in self.layout.gaps:
            self._gradient.flat[start:stop].zero_()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient buffer that are allocated now."""
        buffer = self._gradient
        return buffer.nbytes if buffer is not None and buffer.is_allocated else 0

    def reduce(self) -> None:
        """Start averaging the gradients over all ranks; parameters without one count as zero."""
        self.allocate_gradient()
        assert self._gradient is not None
        for slot in self.slots:
            if not slot.is_written:
                assert slot.grad_view is not None
                slot.grad_view.zero_()
            slot.is_written = False
        self._reducing = self.topology.reduce.reduce_scatter(
            self._gradient.flat, self.unit_name, self._reduce_over_replicas
        )

    @property
    def is_summed(self) -> bool:
        """Whether `sum_over_shards` is known not to block."""
        return self._reducing is None or self._reducing.is_through

    @property
    def is_reduced(self) -> bool:
        """Whether `finish_reduction` is known not to block, after `sum_over_shards`."""
        return self._replicating is None or self._replicating.is_through

    def sum_over_shards(self) -> None:
        """Wait for the sum over ``shard`` and start the one over ``replicate``."""
        pending, self._reducing = self._reducing, None
        if pending is None:
            return
        # Its last gradients come first, as everywhere.
        self._finish_replicating()
        pending.wait()
        assert self._gradient is not None
        if self.topology.num_shards == 1:
            # The update gradients are views of it.
            self._gradient = None
        else:
            self._gradient.free()

    def finish_reduction(self) -> None:
        """Wait for the reduction and hand the averages to the update parameters."""
        self.sum_over_shards()
        self._finish_replicating()

    def _finish_replicating(self) -> None:
        pending, self._replicating = self._replicating, None
        if pending is not None:
            pending.wait()

    def _reduce_over_replicas(self, shard: torch.Tensor) -> None:
        topology = self.topology
        if topology.num_replicas == 1:
            self._accept(shard)
        elif topology.update_sharding == "hierarchical":
            self._replicating = topology.replicate.reduce_scatter(
                shard, self.unit_name, self._accept
            )
        else:
            self._replicating = topology.replicate.all_reduce(
                shard, self.unit_name, finish=lambda: self._accept(shard)
            )

    def _accept(self, gradient: torch.Tensor) -> None:
        topology = self.topology
        gradient.div_(topology.num_shards * topology.num_replicas)
        if topology.is_offloaded:
            host = self._host_or_device_buffer(gradient.numel(), gradient.dtype)
            gradient = host.copy_(gradient, non_blocking=True)
            if any(update.tensor.grad is not None for update in self.update_tensors):
                topology.synchronize_offload()
        for update in self.update_tensors:
            part = gradient[update.start : update.stop].to(update.tensor.dtype)
            if update.tensor.grad is None:
                update.tensor.grad = part
            else:
                update.tensor.grad.add_(part)
