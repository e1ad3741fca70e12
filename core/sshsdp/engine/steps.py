"""What happens around optimizer steps: gradients are handed over, new values are published."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sshsdp.ownership.owned_space import OwnedSpace

if TYPE_CHECKING:
    from sshsdp.comm.topology import Topology
    from sshsdp.engine.attachments import Attachments
    from sshsdp.optim.binding import OptimizerBinding
    from sshsdp.policies import UpdatePolicy
    from sshsdp.schedule.schedule import Schedule
    from sshsdp.stats import Stats

__all__ = ["Steps"]

logger = logging.getLogger(__name__)


class Steps:
    """The way from reduced gradients to published values.

    Attributes:
        stats: Counters of the last whole optimizer step, or since the start if there was none.
    """

    def __init__(
        self,
        attachments: Attachments,
        schedule: Schedule,
        topology: Topology,
        update: UpdatePolicy,
        stats: Stats,
    ) -> None:
        """Have every backward, and every step of an attached optimizer, come by here."""
        attachments.before_step, attachments.after_step = self.before_step, self.after_step
        schedule.on_reduced = self.after_backward
        self.stats = stats
        self._attachments = attachments
        self._schedule = schedule
        self._topology = topology
        self._update = update
        self._stats = stats
        self._has_stepped = False
        self._knows_missing = False

    def before_step(self, binding: OptimizerBinding) -> None:
        """Refuse a step that would be lost, and skip one that would spoil the weights."""
        if self._schedule.is_pinned:
            raise RuntimeError(
                "optimizer.step() inside engine.unsharded(): the gathered parameters would not "
                "see the step. "
                "Leave the context first"
            )
        self._warn_of_missing_parameters()
        if self._update.skip_nonfinite_steps:
            self._skip_if_nonfinite(binding)

    def _warn_of_missing_parameters(self) -> None:
        if self._knows_missing:
            return
        self._knows_missing = True
        bound = self._attachments.bound_slots
        missing = [s.name for s in self._attachments.slots if s.space.trainable and s not in bound]
        if missing and self._topology.world.rank == 0:
            logger.warning(
                "%d trainable parameters are in no attached optimizer and will not change: %s",
                len(missing),
                ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else ""),
            )

    def after_step(self, binding: OptimizerBinding) -> None:
        """Publish the new values."""
        self._schedule.free_all()
        spaces = binding.spaces
        for space in spaces:
            if not isinstance(space, OwnedSpace):
                space.publish()
        owned = [space for space in spaces if isinstance(space, OwnedSpace)]
        if owned and self._attachments.exchange is not None:
            self._attachments.exchange.publish(owned)
        finished = self._stats.roll()
        # The steps of several optimizers after one backward are one step.
        self.stats = self.stats.plus(finished) if self._has_stepped else finished
        self._has_stepped = True

    def after_backward(self) -> None:
        """Agree on the parameters that no rank used, and let the optimizers skip them."""
        self._has_stepped = False
        if self._attachments.exchange is not None:
            self._attachments.exchange.finish_gradients()
        self._topology.synchronize_offload()
        slots = [slot for slot in self._attachments.slots if slot.space.trainable]
        if not slots:
            return
        used = torch.tensor([slot.was_used for slot in slots], dtype=torch.int32)
        flags = used.to(self._topology.device)
        self._topology.world.all_reduce(flags, "used parameters", dist.ReduceOp.MAX).wait()
        # Reading the flags stops the host; this rank used them all, so none can be unused.
        if bool(used.all()):
            return
        unused = {slot.name for slot, flag in zip(slots, flags.tolist(), strict=True) if not flag}
        for binding in self._attachments.bindings:
            binding.drop_unused(unused)

    def _skip_if_nonfinite(self, binding: OptimizerBinding) -> None:
        """Have the optimizer find no gradients if one of them, on any rank, is not finite."""
        updates = [update for _, update in binding.updates()]
        gradients = [update.grad for update in updates if update.grad is not None]
        found = torch.zeros((), dtype=torch.float32, device=self._topology.update_device)
        if gradients:
            # The largest magnitude is NaN or inf if any element is.
            largest = torch.stack(
                [grad.abs().amax() for grad in gradients if grad.numel()] or [found]
            )
            found = (~torch.isfinite(largest)).any().float()
        flag = found.to(self._topology.device)
        self._topology.world.all_reduce(flag, "nonfinite gradients", dist.ReduceOp.MAX).wait()
        if not flag.item():
            return
        for update in updates:
            update.tensor.grad = None
        self._stats.skipped_steps += 1
        if self._topology.world.rank == 0:
            logger.warning("a gradient is not finite: this step changes nothing")
