"""Operations over all reduced gradients: norms, clipping, single gradients, skipped steps."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sshsdp.engine.saving import Checkpointing
from sshsdp.optim.clipping import clip_by_norm, total_norm
from sshsdp.spaces.space import space_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["GradientOperations"]

logger = logging.getLogger(__name__)


class GradientOperations(Checkpointing):
    """The part of the engine that looks at gradients between backward and step."""

    @property
    def slots(self) -> list[ParameterSlot]:
        """The managed parameters, unit by unit."""
        raise NotImplementedError

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_``.

        Collective: sends one number per mesh axis. Parameters without a gradient do not count.

        Args:
            max_norm: The norm to clip to.
            norm_type: Which norm.
            error_if_nonfinite: Raise if the norm is not finite.
            foreach: As in torch.
            optimizer: Take only the gradients of this attached optimizer's parameters; default:
                all.

        Returns:
            The total norm before clipping: a plain 0-d tensor, the same on every rank.

        Raises:
            RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set (on every rank),
                or no optimizer is attached.
        """
        tensors = self._tensors_with_gradients("clip_grad_norm_", optimizer)
        norm = self._norm(tensors, norm_type, foreach)
        clip_by_norm(
            tensors, max_norm, norm, error_if_nonfinite=error_if_nonfinite, foreach=foreach
        )
        return norm

    def grad_norms(
        self, optimizer: torch.optim.Optimizer, norm_type: float = 2.0
    ) -> list[torch.Tensor]:
        """The norm of each param group's gradients. Collective.

        Args:
            optimizer: Attached.
            norm_type: Which norm.

        Returns:
            One 0-d tensor per param group, the same on every rank; 0 for a group without gradients.
        """
        binding = self._attachments.binding_of(optimizer, "grad_norms")
        groups: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for index, update in binding.updates():
            if update.tensor.grad is not None and update.tensor.numel():
                groups[index].append(update.tensor)
        return [self._norm(tensors, norm_type, None) for tensors in groups]

    def gradient(self, name: str) -> torch.Tensor | None:
        """The averaged gradient of one parameter, whole. Collective.

        For looking and for tests: one address space is held whole on the device.

        Args:
            name: Any FQN of the parameter.

        Returns:
            A tensor of the parameter's shape in the update dtype on every rank; None if there is no
            gradient (before the first backward, after ``zero_grad``, or unused by every rank).

        Raises:
            KeyError: No parameter has this name.
            ValueError: The parameter is frozen, or in no attached optimizer.
        """
        slot = next((slot for slot in self.slots if name in slot.aliases), None)
        if slot is None:
            raise KeyError(f"engine.gradient(): the model has no parameter {name!r}")
        space = space_of(slot)
        updates = [update for update in space.update_tensors if slot in update.slots]
        if not space.trainable or slot not in self._attachments.bound_slots:
            reason = "in no attached optimizer" if space.trainable else "frozen"
            raise ValueError(f"engine.gradient(): parameter {name!r} is {reason}")
        has_gradient = torch.tensor(
            any(update.grad is not None for update in updates), device=self.topology.device
        ).float()
        # Its owner alone has the gradient of a whole matrix.
        self.topology.world.all_reduce(has_gradient, name, dist.ReduceOp.MAX).wait()
        if not has_gradient:
            return None
        flat = torch.zeros_like(space.update_shard)
        for update in updates:
            if update.grad is not None:
                flat[update.start : update.stop] = update.grad.reshape(-1)
        return space.view_of(slot, space.collect(flat)).clone()

    def _norm(
        self, tensors: Sequence[torch.Tensor], norm_type: float, foreach: bool | None
    ) -> torch.Tensor:
        axes = [self.topology.reduce]
        if self.topology.num_update_slices > 1:
            axes.append(self.topology.replicate)
        update_dtypes = [space.update_dtype for space in self.spaces if space.trainable]
        return total_norm(
            [tensor.grad for tensor in tensors if tensor.grad is not None],
            norm_type=float(norm_type),
            foreach=foreach,
            over=axes,
            dtype=functools.reduce(torch.promote_types, update_dtypes, torch.float32),
            device=self.topology.device,
        )

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clip every gradient element to ``[-clip_value, clip_value]``. Local."""
        tensors = self._tensors_with_gradients("clip_grad_value_")
        torch.nn.utils.clip_grad_value_(tensors, clip_value, foreach=foreach)

    def _tensors_with_gradients(
        self, caller: str, optimizer: torch.optim.Optimizer | None = None
    ) -> list[torch.Tensor]:
        if not self._attachments.bindings:
            raise RuntimeError(f"engine.{caller}() needs an attached optimizer: engine.attach(...)")
        if optimizer is None:
            updates = [update for space in self.spaces for update in space.update_tensors]
        else:
            updates = [
                update for _, update in self._attachments.binding_of(optimizer, caller).updates()
            ]
        return [u.tensor for u in updates if u.tensor.grad is not None and u.tensor.numel()]
