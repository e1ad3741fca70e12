"""Norms of single gradients, which Lightning's own ``grad_norm`` cannot read from shards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_sshsdp.environment import engine_of

if TYPE_CHECKING:
    from torch import nn

    import sshsdp

__all__ = ["grad_norm"]


def grad_norm(
    module: nn.Module, norm_type: float | str = 2, group_separator: str = "/"
) -> dict[str, float]:
    """The norm of each parameter's gradient and of all together, over all ranks. Collective.

    Takes the place of ``lightning.pytorch.utilities.grad_norm``, for example in
    ``on_before_optimizer_step``: ``self.log_dict(grad_norm(self, 2))``.

    Args:
        module: The LightningModule (or whatever the strategy has sharded).
        norm_type: Of the p-norm, positive or ``"inf"``.
        group_separator: Between the prefix and the parameter's name.

    Returns:
        Norms under Lightning's names; parameters without a gradient are left out.

    Raises:
        ValueError: The norm type is not positive, or the module is not sharded.
    """
    engine = engine_of(module)
    if engine is None:
        raise ValueError(
            f"this {type(module).__name__} is not sharded: use Lightning's own grad_norm for it"
        )
    power = float(norm_type)
    if power <= 0:
        raise ValueError(f"norm_type must be positive or 'inf', got {norm_type!r}")
    # The engine leaves out the level that torch's wrapper for activation checkpointing puts in.
    names = [
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in module.named_parameters()
    ]
    norms, has_gradient = _norms(engine, names, power)
    prefix = f"grad_{power}_norm"
    found = {
        f"{prefix}{group_separator}{name}": float(norm)
        for name, norm, known in zip(names, norms, has_gradient, strict=True)
        if known
    }
    if found:
        found[f"{prefix}_total"] = float(norms.norm(power))
    return found


def _norms(
    engine: sshsdp.Engine, names: list[str], power: float
) -> tuple[torch.Tensor, list[bool]]:
    position = {name: index for index, name in enumerate(names)}
    device = engine.topology.device
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=device)
    for name, update in engine.update_parameters():
        if update.grad is None:
            continue
        part = update.grad.detach().double().norm(power).to(device)
        index = position[name]
        sums[1, index] = 1
        if math.isinf(power):
            sums[0, index] = torch.maximum(sums[0, index], part)
        else:
            sums[0, index] += part**power
    if math.isinf(power):
        dist.all_reduce(sums, dist.ReduceOp.MAX)
        return sums[0], sums[1].bool().tolist()
    dist.all_reduce(sums)
    # With a replicated update, each replica group has counted everything.
    sums /= engine.topology.num_replicas / engine.topology.num_update_slices
    return sums[0] ** (1 / power), sums[1].bool().tolist()
