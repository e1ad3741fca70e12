"""The engine: what a user holds after `sshsdp.shard`."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sshsdp.engine.arrangement import Arrangement, plan_arrangement
from sshsdp.engine.exchange import MatrixExchange
from sshsdp.engine.gradient_operations import GradientOperations
from sshsdp.engine.gradients import install_rules, remove_rules
from sshsdp.engine.hooks import ModuleHooks
from sshsdp.engine.orders import Orders
from sshsdp.engine.owned_space import OwnedSpace
from sshsdp.engine.packing import fuse_linears
from sshsdp.engine.row_binding import cuts_for_rows
from sshsdp.engine.schedule import Schedule
from sshsdp.engine.watch import ModelWatch
from sshsdp.layout.cuts import blocks, elements
from sshsdp.layout.layout import Layout, UnitLayout
from sshsdp.optim.binding import OptimizerBinding, check_groups, refuse_unattached_optimizers
from sshsdp.optim.blocks import block_size_for
from sshsdp.optim.matrices import granularity_for, matrices_for, whole_matrix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from sshsdp.engine.collectives import CollectiveRecord
    from sshsdp.engine.slots import ParameterSlot
    from sshsdp.engine.space import ShardedSpace
    from sshsdp.engine.topology import Topology
    from sshsdp.engine.unit import Unit
    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.optim.granularity import Granularity
    from sshsdp.policies import RuntimePolicy, UpdatePolicy
    from sshsdp.stats import Stats

__all__ = ["Engine", "UpdateParameter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdateParameter:
    """This rank's part of one parameter's update state.

    Attributes:
        name: FQN of the parameter.
        shape: Its original shape.
        start: First element of the part, in row-major order of the parameter.
        tensor: The values: 1-D, update dtype, a view of the update shard. May be empty.
        grad: The averaged gradient of the same elements, or None.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    grad: torch.Tensor | None


class Engine(GradientOperations):
    """Runs a sharded model; made by `sshsdp.shard`.

    Example:
        >>> engine = sshsdp.shard(model)  # doctest: +SKIP
        >>> optimizer = engine.attach(torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        >>> model(batch).loss.backward()  # doctest: +SKIP
        >>> engine.clip_grad_norm_(1.0)  # doctest: +SKIP
        >>> optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        topology: Topology,
        runtime: RuntimePolicy,
        update: UpdatePolicy,
        stats: Stats,
    ) -> None:
        """Hook the model. Use `sshsdp.shard` instead."""
        self.model = model
        self.topology = topology
        self.runtime = runtime
        self.update = update
        self._stats = stats
        self._last_stats = stats
        self._bindings: list[OptimizerBinding] = []
        self._knows_missing = False
        self._exchange: MatrixExchange | None = None
        self._has_stepped = False
        self.is_closed = False
        self._schedule = Schedule(
            units,
            prefetch=runtime.prefetch,
            reshard_after_forward=runtime.reshard_after_forward,
            stats=stats,
            agree_on_orders=self._agree_on_orders,
            on_reduced=self._on_reduced,
        )
        for slot in self.slots:
            slot.connect(self._schedule.enter_backward, self._schedule.note_unwanted_gradient)
        for unit in units:
            for pack in unit.packs:
                pack.follow_members()
        self._watch = ModelWatch(model)
        casts = runtime.dtype if runtime.cast_forward_inputs else None
        self._hooks = ModuleHooks(
            self._schedule, cast_inputs_to=casts, check_model=self._watch.check
        )
        self._ruled = install_rules(model)
        packs = [pack for unit in units for pack in unit.packs]
        self._fused = fuse_linears(runtime.packs, packs)
        model.zero_grad = self.zero_grad  # type: ignore[method-assign]
        refuse_unattached_optimizers()
        stats.roll()
        logger.info("%s", self.layout)

    # What there is

    @property
    def units(self) -> list[Unit]:
        """The communication units, the root first."""
        return self._schedule.units

    @property
    def slots(self) -> list[ParameterSlot]:
        """The managed parameters, unit by unit."""
        return [slot for unit in self.units for slot in unit.slots]

    @property
    def spaces(self) -> list[ShardedSpace]:
        """All address spaces, unit by unit."""
        return [space for unit in self.units for space in unit.spaces]

    @property
    def layout(self) -> Layout:
        """Where everything lies; printable."""
        return Layout(
            units=tuple(
                UnitLayout(
                    name=unit.name,
                    spaces=tuple(space.layout for space in unit.spaces),
                    runtime_dtypes=tuple(space.runtime.element_dtype for space in unit.spaces),
                    trainable=tuple(space.trainable for space in unit.spaces),
                    owned=tuple(isinstance(space, OwnedSpace) for space in unit.spaces),
                )
                for unit in self.units
            ),
            num_shards=self.topology.num_shards,
            num_replicas=self.topology.num_replicas,
        )

    @property
    def stats(self) -> Stats:
        """Counters of the last whole optimizer step, or since the start if there was none."""
        return self._last_stats

    def optimization_units(self) -> Iterator[OptimizationUnit]:
        """The matrices (and vectors) of the model, as matrix optimizers take them.

        One for most parameters; more where ``UpdatePolicy.splits`` or the model's structure cuts a
        parameter into several.
        """
        for slot in self.slots:
            yield from slot.optimization_units

    def update_parameters(self) -> Iterator[tuple[str, UpdateParameter]]:
        """This rank's parts of all trainable parameters, empty ones left out."""
        for space in self.spaces:
            if not space.trainable:
                continue
            for piece, tensor in space.update_pieces():
                yield (
                    piece.name,
                    UpdateParameter(
                        name=piece.name,
                        shape=piece.shape,
                        start=piece.start,
                        tensor=tensor,
                        grad=space.gradient_of(piece),
                    ),
                )

    def packed(self, name: str) -> nn.Parameter:
        """The runtime tensor of a pack, for kernels: one leaf, ``[sum of dim 0, ...]``.

        Readable while its unit is gathered, as parameters are. A gradient that reaches it reaches
        the members.

        Args:
            name: FQN of any member.

        Raises:
            KeyError: The parameter is in no pack.
        """
        for unit in self.units:
            for pack in unit.packs:
                if any(name in member.aliases for member in pack.members):
                    return pack.parameter
        raise KeyError(f"parameter {name!r} is in no pack; see RuntimePolicy(packs=...)")

    @contextlib.contextmanager
    def record_collectives(self) -> Iterator[list[CollectiveRecord]]:
        """Collect every collective that this rank issues inside the context, in order."""
        records: list[CollectiveRecord] = []
        everything = [*self.topology.all(), *(self._exchange.all() if self._exchange else ())]
        for collectives in everything:
            collectives.recording = records
        try:
            yield records
        finally:
            for collectives in everything:
                collectives.recording = None

    # Optimizers and gradients

    def attach(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> Any:
        """Point an optimizer (or several) at the update parameters, in place.

        Param groups keep their settings and their order; their ``params`` become local tensors:
        flat ones, one for each unit and group, or, for optimizers that must see whole matrices, the
        matrices that this rank owns. After each ``step`` the new values are published to the
        runtime shards. Collective, as is each ``step`` of an optimizer on whole matrices.

        An attached optimizer to which ``add_param_group`` has given more of the model's parameters
        is attached once more for those.

        Args:
            optimizer: Built from the model's parameters, before or after `sshsdp.shard`.

        Returns:
            ``optimizer``.

        Raises:
            ValueError: A group holds a tensor that is no parameter of the model, a parameter
                belongs to an attached optimizer already, or the class cannot work on a sharded
                model.
            RuntimeError: Parameters of an optimizer that was stepped would have to move.
        """
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
        error: Exception | None = None
        groups: list[list[list[ParameterSlot]]] = []
        arrangement = Arrangement()
        try:
            self._watch.check()
            groups = [check_groups(one, self.slots, self._num_bound(one)) for one in optimizers]
            self._check_unbound(groups)
            arrangement = self._plan_arrangement(optimizers, groups)
        except Exception as caught:
            error = caught
        self._agree(
            [
                (f"group {index} of {type(one).__name__}", str([slot.name for slot in group]))
                for one, its_groups in zip(optimizers, groups, strict=False)
                for index, group in enumerate(its_groups)
            ],
            error,
            "engine.attach()",
        )
        self._set_cuts(optimizers, groups)
        self._arrange(arrangement, [group for its_groups in groups for group in its_groups])
        bindings = {binding.optimizer: binding for binding in self._bindings}
        for one, its_groups in zip(optimizers, groups, strict=True):
            if one in bindings:
                bindings[one].extend(its_groups)
            else:
                binding = OptimizerBinding(one, its_groups, self._before_step, self._on_step)
                self._bindings.append(binding)
        return optimizer

    def _num_bound(self, optimizer: torch.optim.Optimizer) -> int:
        """How many param groups of an optimizer are attached."""
        return sum(len(b.groups) for b in self._bindings if b.optimizer is optimizer)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The attached optimizers, in the order of their `attach`."""
        return [binding.optimizer for binding in self._bindings]

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo `attach`: the optimizer holds the model's parameters again, without state.

        Gradients of its parameters are dropped too. Another optimizer may then be attached for
        them.

        Raises:
            ValueError: The optimizer is not attached.
        """
        binding = self._binding_of(optimizer, "detach")
        self._bindings.remove(binding)
        binding.detach()

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        """The model's parameters that an attached optimizer trains, by param group.

        Frozen parameters that its groups held are among them.

        Raises:
            ValueError: The optimizer is not attached.
        """
        binding = self._binding_of(optimizer, "parameters_of")
        return [[slot.parameter for slot in group] for group in binding.groups]

    def _binding_of(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerBinding:
        for binding in self._bindings:
            if binding.optimizer is optimizer:
                return binding
        raise ValueError(
            f"engine.{caller}(): this {type(optimizer).__name__} is not attached: "
            "engine.attach(optimizer)"
        )

    def _check_unbound(self, groups: list[list[list[ParameterSlot]]]) -> None:
        bound = {slot for b in self._bindings for group in b.groups for slot in group}
        for its_groups in groups:
            for slot in [slot for group in its_groups for slot in group]:
                if slot in bound and slot.space.trainable:
                    raise ValueError(
                        f"parameter {slot.name!r} belongs to an attached optimizer already"
                    )
                bound.add(slot)

    def _granularities(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterSlot]]
    ) -> Iterator[tuple[ParameterSlot, Granularity]]:
        num_ranks = self.topology.num_shards * self.topology.num_update_slices
        added = optimizer.param_groups[self._num_bound(optimizer) :]
        for settings, group in zip(added, groups, strict=True):
            for slot in group:
                if slot.space.trainable:
                    yield slot, granularity_for(optimizer, settings, slot, num_ranks)

    def _set_cuts(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Sequence[Sequence[Sequence[ParameterSlot]]],
    ) -> None:
        packed = {member for unit in self.units for pack in unit.packs for member in pack.members}
        for one, its_groups in zip(optimizers, groups, strict=True):
            for slot, granularity in self._granularities(one, its_groups):
                block = block_size_for(one, slot.shape) if granularity == "block" else 1
                cuts = blocks(block)
                if granularity == "row":
                    cuts = cuts_for_rows(slot, is_packed=slot in packed)
                if cuts != elements() and slot.space.update_tensors:
                    raise ValueError(
                        f"parameter {slot.name!r} shares an address space with parameters of an "
                        f"attached optimizer, and {type(one).__name__} needs it cut between "
                        f"{granularity}s: attach all optimizers in one call, engine.attach([...])"
                    )
                slot.granularity, slot.block, slot.cuts = granularity, block, cuts

    def _plan_arrangement(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Sequence[Sequence[Sequence[ParameterSlot]]],
    ) -> Arrangement:
        wishes: dict[ParameterSlot, tuple[OptimizationUnit, ...] | None] = {}
        for one, its_groups in zip(optimizers, groups, strict=True):
            for slot, granularity in self._granularities(one, its_groups):
                wishes[slot] = matrices_for(one, slot) if granularity == "matrix" else None
        arrangement = plan_arrangement(self.units, wishes, whole_matrix)
        for binding in self._bindings:
            binding.check_may_move(arrangement.moved_spaces)
        return arrangement

    def _arrange(self, arrangement: Arrangement, groups: list[list[ParameterSlot]]) -> None:
        if arrangement.needs_owners and self._exchange is None:
            self._exchange = MatrixExchange(self.topology)
        arrangement.carry_out(self.topology, self._exchange)
        bound = [group for binding in self._bindings for group in binding.groups]
        self._make_groups_contiguous([*bound, *groups])
        if arrangement.pools:
            for binding in self._bindings:
                binding.rebind()

    def _make_groups_contiguous(self, groups: list[list[ParameterSlot]]) -> None:
        label = {slot: index for index, group in enumerate(groups) for slot in group}
        for space in self.spaces:
            # What is quantized is apart from what is not.
            keys = [(label.get(slot, len(groups)), slot.block) for slot in space.slots]
            num_runs = 1 + sum(a != b for a, b in pairwise(keys))
            is_free = all(slot.cuts == elements() for slot in space.slots)
            is_settled = isinstance(space, OwnedSpace) or (num_runs == len(set(keys)) and is_free)
            if not space.trainable or space.update_tensors or is_settled:
                continue
            rank = {key: index for index, key in enumerate(sorted(set(keys)))}
            space.rearrange(
                space.rearranged({s: rank[key] for s, key in zip(space.slots, keys, strict=True)})
            )

    @contextlib.contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients of backwards inside the context without reducing them.

        The unsharded gradients stay on this rank (in the reduce dtype) until a backward outside of
        the context reduces their sum. Gradients add up over micro-batches and are averaged over
        ranks.

        Args:
            enabled: False: backwards inside the context reduce, also within an outer `no_sync`.
        """
        before = self._schedule.is_synchronizing
        self._schedule.is_synchronizing = not enabled
        try:
            yield
        finally:
            self._schedule.is_synchronizing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those accumulated under `no_sync` included.

        Args:
            set_to_none: Kept for ``nn.Module.zero_grad``'s signature; gradients are always dropped.
        """
        if self._exchange is not None:
            self._exchange.abandon_gradients()
        for space in self.spaces:
            space.drop_gradients()

    def _before_step(self, binding: OptimizerBinding) -> None:
        if self._schedule.is_pinned:
            raise RuntimeError(
                "optimizer.step() inside engine.unsharded(): the gathered parameters would not "
                "see the step. "
                "Leave the context first"
            )
        self._warn_of_missing_parameters()
        if self.update.skip_nonfinite_steps:
            self._skip_if_nonfinite(binding)

    def _warn_of_missing_parameters(self) -> None:
        if self._knows_missing:
            return
        self._knows_missing = True
        bound = {slot for b in self._bindings for group in b.groups for slot in group}
        missing = [s.name for s in self.slots if s.space.trainable and s not in bound]
        if missing and self.topology.world.rank == 0:
            logger.warning(
                "%d trainable parameters are in no attached optimizer and will not change: %s",
                len(missing),
                ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else ""),
            )

    def _on_step(self, binding: OptimizerBinding) -> None:
        self._schedule.free_all()
        spaces = binding.spaces
        for space in spaces:
            if not isinstance(space, OwnedSpace):
                space.publish()
        owned = [space for space in spaces if isinstance(space, OwnedSpace)]
        if owned and self._exchange is not None:
            self._exchange.publish(owned)
        finished = self._stats.roll()
        # The steps of several optimizers after one backward are one step.
        self._last_stats = self._last_stats.plus(finished) if self._has_stepped else finished
        self._has_stepped = True

    def _on_reduced(self) -> None:
        """Agree on the parameters that no rank used, and let the optimizers skip them."""
        self._has_stepped = False
        if self._exchange is not None:
            self._exchange.finish_gradients()
        self.topology.synchronize_offload()
        slots = [slot for slot in self.slots if slot.space.trainable]
        if not slots:
            return
        used = torch.tensor([slot.was_used for slot in slots], dtype=torch.int32)
        flags = used.to(self.topology.device)
        self.topology.world.all_reduce(flags, "used parameters", dist.ReduceOp.MAX).wait()
        # Reading the flags stops the host; this rank used them all, so none can be unused.
        if bool(used.all()):
            return
        unused = {slot.name for slot, flag in zip(slots, flags.tolist(), strict=True) if not flag}
        for binding in self._bindings:
            binding.drop_unused(unused)

    def _agree_on_orders(self, seen: Orders) -> Orders:
        index = {unit: position for position, unit in enumerate(self.units)}
        mine = [[index[unit] for unit in seen_units] for seen_units in seen]
        everyone: list[Any] = [None] * self.topology.world.size
        dist.all_gather_object(everyone, mine, group=self.topology.world.group)
        return Orders.merged(self.units, everyone)

    # Whole parameters

    @contextlib.contextmanager
    def unsharded(self, writes: bool = False) -> Iterator[None]:
        """Have every runtime parameter whole, on every rank, inside the context.

        Collective on entry only (and on exit with ``writes``): inside, ranks may run the model, or
        generate, as unevenly as they like.

        Parameters in MXFP8 are multiplied as in training, and give their values as ordinary tensors
        with ``.dequantize()`` or ``.float()``; with ``writes`` they are dense tensors of these
        values.

        Args:
            writes: Take over what was changed: each rank keeps the elements that it owns, so all
                ranks must have made the same changes.
        """
        if self._schedule.is_pinned:
            raise RuntimeError("engine.unsharded() does not nest")
        self._schedule.gather_all()
        self._schedule.is_pinned = True
        if writes:
            for unit in self.units:
                unit.show_dense()
        try:
            yield
            if writes:
                for space in self.spaces:
                    space.take_changes()
        finally:
            self._schedule.is_pinned = False
            self._schedule.free_all(spares_kept=not writes)

    @property
    def is_unsharded(self) -> bool:
        """Whether `unsharded` is in effect: forwards are not collective then."""
        return self._schedule.is_pinned

    def close(self) -> None:
        """Remove all hooks and leave an ordinary model with whole parameters on every rank.

        Collective. Parameters keep their identity and take the master values, cast to the runtime
        dtype. Attached optimizers are detached: they hold the model's parameters again. A second
        call does nothing.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for binding in self._bindings:
            binding.detach()
        self._bindings.clear()
        self._hooks.remove()
        for fused in self._fused:
            fused.remove()
        remove_rules(self._ruled)
        self.model.__dict__.pop("zero_grad", None)
        self._schedule.gather_all()
        for space in self.spaces:
            space.release()
