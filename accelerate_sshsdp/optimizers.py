"""Prepared optimizers: which engine they belong to, and when they are pointed at it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import accelerate
    import torch
    from torch import nn

    import sshsdp

__all__ = ["attach", "refers_to", "unwrap_optimizer", "watch_unattached"]

logger = logging.getLogger(__name__)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def refers_to(
    optimizer: torch.optim.Optimizer, owner: Mapping[nn.Parameter, sshsdp.Engine]
) -> list[sshsdp.Engine]:
    """The engines whose runtime parameters an optimizer holds: none, or one.

    Args:
        optimizer: A torch optimizer.
        owner: The engine of every runtime parameter.

    Raises:
        ValueError: It holds parameters of several models.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if p in owner]
    engines = list(dict.fromkeys(owner[parameter] for parameter in held))
    if len(engines) > 1:
        names = " and ".join(type(engine.model).__name__ for engine in engines)
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters of {names}, which are sharded apart: "
            "make one optimizer for each model, or put the models into one nn.Module and prepare "
            "that"
        )
    return engines


def attach(engine: sshsdp.Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Attach optimizers to their engine, in place of forgotten ones. Collective.

    Raises:
        ValueError: An optimizer does not fit the model, or cannot work on shards.
    """
    if not optimizers:
        return
    wanted = {p for one in optimizers for group in one.param_groups for p in group["params"]}
    for former in engine.optimizers:
        # Those of an earlier training, which `free_memory` has made the accelerator forget.
        if any(p in wanted for group in engine.parameters_of(former) for p in group):
            engine.detach(former)
    engine.attach(optimizers)
    for one in optimizers:
        one.register_state_dict_pre_hook(_refuser(engine))
        one.register_load_state_dict_pre_hook(_refuser(engine))


def _refuser(engine: sshsdp.Engine) -> Any:
    """A hook that keeps an optimizer's own ``state_dict`` methods from being used by mistake."""

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is one for one in engine.optimizers):
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds flat pieces of the state, other ones on "
                "each rank: use accelerator.save_state() and load_state(), or call, on all ranks, "
                "engine_of(model).full_optimizer_state_dict(optimizer) and "
                "load_full_optimizer_state_dict(optimizer, state)"
            )

    return refuse


def watch_unattached(optimizer: torch.optim.Optimizer, accelerator: accelerate.Accelerator) -> None:
    """Warn once if an optimizer is stepped whose model was never prepared."""
    is_first = True

    def warn(stepped: torch.optim.Optimizer, *_: Any) -> None:
        # A hook cannot be removed while hooks run.
        nonlocal is_first
        attached = [one for engine in accelerator.engines for one in engine.optimizers]
        is_lonely = is_first and not any(stepped is one for one in attached)
        if is_lonely and accelerator.num_processes > 1:
            logger.warning(
                "%s trains parameters of no prepared model: their gradients are not averaged over "
                "the ranks. Pass the model to accelerator.prepare() as well",
                type(stepped).__name__,
            )
        is_first = False

    optimizer.register_step_pre_hook(warn)
