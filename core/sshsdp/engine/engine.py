"""The engine: what a user holds after `sshsdp.shard`."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sshsdp.assembly.packing import fuse_linears
from sshsdp.assembly.watch import ModelWatch
from sshsdp.engine.attachments import Attachments
from sshsdp.engine.gradient_operations import GradientOperations
from sshsdp.engine.steps import Steps
from sshsdp.layout.layout import Layout, UnitLayout
from sshsdp.optim.binding import refuse_unattached_optimizers
from sshsdp.ownership.owned_space import OwnedSpace
from sshsdp.parameters.zero_copy import install_rules, remove_rules
from sshsdp.schedule.hooks import ModuleHooks
from sshsdp.schedule.orders import Orders
from sshsdp.schedule.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from sshsdp.comm.collectives import CollectiveRecord
    from sshsdp.comm.topology import Topology
    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.policies import RuntimePolicy, UpdatePolicy
    from sshsdp.spaces.space import ShardedSpace
    from sshsdp.spaces.unit import Unit
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
        self.is_closed = False
        self._watch = ModelWatch(model)
        self._attachments = Attachments(units, topology, self._watch)
        self._schedule = Schedule(
            units,
            prefetch=runtime.prefetch,
            reshard_after_forward=runtime.reshard_after_forward,
            stats=stats,
            agree_on_orders=self._agree_on_orders,
        )
        self._steps = Steps(self._attachments, self._schedule, topology, update, stats)
        for slot in self.slots:
            slot.connect(self._schedule.enter_backward, self._schedule.note_unwanted_gradient)
        for unit in units:
            for pack in unit.packs:
                pack.follow_members()
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
        return self._steps.stats

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
        exchange = self._attachments.exchange
        everything = [*self.topology.all(), *(exchange.all() if exchange else ())]
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
        self._attachments.attach(optimizer)
        return optimizer

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The attached optimizers, in the order of their `attach`."""
        return [binding.optimizer for binding in self._attachments.bindings]

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo `attach`: the optimizer holds the model's parameters again, without state.

        Gradients of its parameters are dropped too. Another optimizer may then be attached for
        them.

        Raises:
            ValueError: The optimizer is not attached.
        """
        self._attachments.detach(optimizer)

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        """The model's parameters that an attached optimizer trains, by param group.

        Frozen parameters that its groups held are among them.

        Raises:
            ValueError: The optimizer is not attached.
        """
        binding = self._attachments.binding_of(optimizer, "parameters_of")
        return [[slot.parameter for slot in group] for group in binding.groups]

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
        if self._attachments.exchange is not None:
            self._attachments.exchange.abandon_gradients()
        for space in self.spaces:
            space.drop_gradients()

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
        self._attachments.detach_all()
        self._hooks.remove()
        for fused in self._fused:
            fused.remove()
        remove_rules(self._ruled)
        self.model.__dict__.pop("zero_grad", None)
        self._schedule.gather_all()
        for space in self.spaces:
            space.release()
