"""Norms and clipping over gradients that are spread over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.comm.collectives import Collectives

__all__ = ["clip_by_norm", "total_norm"]


def total_norm(
    gradients: Sequence[torch.Tensor],
    *,
    norm_type: float,
    foreach: bool | None,
    over: Sequence[Collectives],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Norm of the concatenation of all ranks' ``gradients``; a 0-d tensor, equal on every rank.

    Sends one number, in ``dtype``, which a rank without gradients could not tell: the norms are
    combined as ``(sum of norm^p)^(1/p)``, or their maximum.
    """
    if gradients:
        norm = get_total_norm(list(gradients), norm_type, foreach=foreach).to(device, dtype)
    else:
        norm = torch.zeros((), dtype=dtype, device=device)
    if math.isinf(norm_type):
        for collectives in over:
            collectives.all_reduce(norm, "gradient norm", dist.ReduceOp.MAX).wait()
        return norm
    power = norm.pow(norm_type)
    for collectives in over:
        collectives.all_reduce(power, "gradient norm").wait()
    return power.pow(1.0 / norm_type)


def clip_by_norm(
    tensors: Sequence[torch.Tensor],
    max_norm: float,
    norm: torch.Tensor,
    *,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> None:
    """Scale gradients down to ``max_norm``, with torch's own coefficient.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total gradient norm is {norm.item()}: not finite, so clipping would spread it. "
            "Pass error_if_nonfinite=False to clip anyway"
        )
    clip_grads_with_norm_(list(tensors), max_norm, norm, foreach=foreach)
