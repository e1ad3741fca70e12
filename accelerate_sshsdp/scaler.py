"""Loss scaling when each rank sees only its part of the gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["GlobalGradScaler"]


class GlobalGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose ranks agree on whether a gradient is not finite.

    With a plain one, the rank that holds an infinite gradient would skip its step and halve its
    scale while the others go on: weights and scales would part for good.
    """

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        per_device = super()._unscale_grads_(*args, **kwargs)
        assert self._scale is not None
        # Also where this rank has no gradient at all, or the others would wait for it.
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        for mine in per_device.values():
            found += mine.to(found.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found}
