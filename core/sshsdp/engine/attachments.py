"""Which optimizers train which parameters, and where their update parameters lie.

Attaching settles the order inside of address spaces, moves matrices to owners where an optimizer
must see them whole, and points the optimizer's param groups at the update parameters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from sshsdp.assembly.arrangement import Arrangement, plan_arrangement
from sshsdp.comm.agreement import agree
from sshsdp.layout.cuts import blocks, elements
from sshsdp.optim.binding import OptimizerBinding, check_groups
from sshsdp.optim.blocks import block_size_for
from sshsdp.optim.matrices import granularity_for, matrices_for, whole_matrix
from sshsdp.optim.row_binding import cuts_for_rows
from sshsdp.ownership.exchange import MatrixExchange
from sshsdp.ownership.owned_space import OwnedSpace
from sshsdp.spaces.space import space_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sshsdp.assembly.watch import ModelWatch
    from sshsdp.comm.topology import Topology
    from sshsdp.layout.cuts import Granularity
    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.spaces.space import ShardedSpace
    from sshsdp.spaces.unit import Unit

__all__ = ["Attachments"]


class Attachments:
    """The optimizers of an engine.

    Attributes:
        bindings: One for each attached optimizer, in the order of `attach`.
        exchange: Moves what belongs to owned matrices, once there are any.
        before_step: Called with the binding before every optimizer step.
        after_step: Called with it after every one.
    """

    before_step: Callable[[OptimizerBinding], None]
    after_step: Callable[[OptimizerBinding], None]

    def __init__(self, units: Sequence[Unit], topology: Topology, watch: ModelWatch) -> None:
        """Start with none."""
        self.bindings: list[OptimizerBinding] = []
        self.exchange: MatrixExchange | None = None
        self._units = units
        self._topology = topology
        self._watch = watch

    @property
    def spaces(self) -> list[ShardedSpace]:
        """All address spaces, unit by unit."""
        return [space for unit in self._units for space in unit.spaces]

    @property
    def slots(self) -> list[ParameterSlot]:
        """The managed parameters, unit by unit."""
        return [slot for unit in self._units for slot in unit.slots]

    @property
    def bound_slots(self) -> set[ParameterSlot]:
        """The parameters of the attached optimizers, frozen ones included."""
        return {slot for b in self.bindings for group in b.groups for slot in group}

    def attach(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """See `sshsdp.Engine.attach`."""
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
        agree(
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
        bindings = {binding.optimizer: binding for binding in self.bindings}
        for one, its_groups in zip(optimizers, groups, strict=True):
            if one in bindings:
                bindings[one].extend(its_groups)
            else:
                binding = OptimizerBinding(one, its_groups, self.before_step, self.after_step)
                self.bindings.append(binding)

    def detach(self, optimizer: torch.optim.Optimizer) -> None:
        """See `sshsdp.Engine.detach`."""
        binding = self.binding_of(optimizer, "detach")
        self.bindings.remove(binding)
        binding.detach()

    def detach_all(self) -> None:
        """Give all optimizers the model's parameters back."""
        for binding in self.bindings:
            binding.detach()
        self.bindings.clear()

    def binding_of(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerBinding:
        """The binding of an attached optimizer.

        Raises:
            ValueError: It is not attached; the message names ``caller``.
        """
        for binding in self.bindings:
            if binding.optimizer is optimizer:
                return binding
        raise ValueError(
            f"engine.{caller}(): this {type(optimizer).__name__} is not attached: "
            "engine.attach(optimizer)"
        )

    def _num_bound(self, optimizer: torch.optim.Optimizer) -> int:
        """How many param groups of an optimizer are attached."""
        return sum(len(b.groups) for b in self.bindings if b.optimizer is optimizer)

    def _check_unbound(self, groups: list[list[list[ParameterSlot]]]) -> None:
        bound = self.bound_slots
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
        num_ranks = self._topology.num_shards * self._topology.num_update_slices
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
        packed = {member for unit in self._units for pack in unit.packs for member in pack.members}
        for one, its_groups in zip(optimizers, groups, strict=True):
            for slot, granularity in self._granularities(one, its_groups):
                block = block_size_for(one, slot.shape) if granularity == "block" else 1
                cuts = blocks(block)
                if granularity == "row":
                    cuts = cuts_for_rows(slot, is_packed=slot in packed)
                if cuts != elements() and space_of(slot).update_tensors:
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
        arrangement = plan_arrangement(self._units, wishes, whole_matrix)
        for binding in self.bindings:
            binding.check_may_move(arrangement.moved_spaces)
        return arrangement

    def _arrange(self, arrangement: Arrangement, groups: list[list[ParameterSlot]]) -> None:
        if arrangement.needs_owners and self.exchange is None:
            self.exchange = MatrixExchange(self._topology)
        arrangement.carry_out(self._topology, self.exchange)
        bound = [group for binding in self.bindings for group in binding.groups]
        self._make_groups_contiguous([*bound, *groups])
        if arrangement.pools:
            for binding in self.bindings:
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
