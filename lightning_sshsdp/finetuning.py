"""Lightning's finetuning callbacks, which unfreeze and extend optimizers while training runs.

Their hooks run on whole parameters, with the optimizers' groups holding the model's parameters as
the callbacks expect. If a hook has made frozen parameters trainable or added param groups, the
module is sharded anew afterwards, weights and optimizer states included: the whole model is then on
every device for a moment, and a copy of weights and states in rank 0's memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lightning_sshsdp.environment import attach

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    import sshsdp

__all__ = ["follow_finetuning"]

_MARK = "_sshsdp_follows"


def follow_finetuning(strategy: Any, callbacks: list[Any]) -> None:
    """Wrap the hooks of finetuning callbacks in which they change the model. Idempotent."""
    base = strategy.family.trainer_name("callbacks.BaseFinetuning")
    for callback in callbacks:
        if isinstance(callback, base) and _MARK not in vars(callback):
            setattr(callback, _MARK, True)
            callback.on_fit_start = _following(strategy, callback.on_fit_start)
            callback.on_train_epoch_start = _following(strategy, callback.on_train_epoch_start)


def _following(strategy: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        engine: sshsdp.Engine = strategy.engine
        optimizers = [_HeldOptimizer(engine, optimizer) for optimizer in engine.optimizers]
        trained = {p for p in pl_module.parameters() if p.requires_grad}
        with engine.unsharded():
            for optimizer in optimizers:
                optimizer.show()
            hook(trainer, pl_module, *args)
            for optimizer in optimizers:
                optimizer.hide()
        thawed = [p for p in pl_module.parameters() if p.requires_grad and p not in trained]
        if thawed or any(optimizer.is_changed for optimizer in optimizers):
            _shard_anew(strategy, engine, optimizers, thawed)

    return run


class _HeldOptimizer:
    """An attached optimizer, shown to a hook with the model's parameters in its groups."""

    def __init__(self, engine: sshsdp.Engine, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = engine.parameters_of(optimizer)
        self._groups = [*optimizer.param_groups]
        self._updates = [group["params"] for group in self._groups]
        self._new_groups: list[dict[str, Any]] = []

    def show(self) -> None:
        """Let the groups hold the model's parameters."""
        for group, parameters in zip(self._groups, self._parameters, strict=True):
            group["params"] = parameters

    def hide(self) -> None:
        """Let the old groups hold the update parameters again, and take the new ones out."""
        given = self.optimizer.param_groups
        is_extended = all(a is b for a, b in zip(given, self._groups, strict=False))
        self._new_groups = given[len(self._groups) :] if is_extended else given
        self.is_replaced = not is_extended
        self.optimizer.param_groups = [*self._groups]
        for group, updates in zip(self._groups, self._updates, strict=True):
            group["params"] = updates

    @property
    def is_changed(self) -> bool:
        """Whether the hook added or replaced groups."""
        return bool(self._new_groups)

    def take_new_groups(self) -> None:
        """With the old groups back at the model's parameters: have what the hook has made."""
        kept = [] if self.is_replaced else self.optimizer.param_groups
        self.optimizer.param_groups = [*kept, *self._new_groups]

    def extended(self, state: dict[str, Any]) -> dict[str, Any]:
        """A whole state of the old groups, with the new ones, which have none yet."""
        if not state or self.is_replaced:
            return state
        groups = [*state["param_groups"]]
        start = sum(len(group["params"]) for group in groups)
        for group in self._new_groups:
            indices = range(start, start + len(group["params"]))
            groups.append({**group, "params": [*indices]})
            start += len(indices)
        return {**state, "param_groups": groups}


def _shard_anew(
    strategy: Any,
    engine: sshsdp.Engine,
    optimizers: list[_HeldOptimizer],
    thawed: list[nn.Parameter],
) -> None:
    # The engine works with what was frozen when it was made.
    for parameter in thawed:
        parameter.requires_grad_(False)
    weights = engine.full_state_dict()
    states = [
        held.extended(engine.full_optimizer_state_dict(held.optimizer)) for held in optimizers
    ]
    engine.close()
    for parameter in thawed:
        parameter.requires_grad_(True)
    engine = strategy.shard_module()
    engine.load_full_state_dict(weights)
    for held in optimizers:
        held.take_new_groups()
    attach(engine, [held.optimizer for held in optimizers])
    for held, state in zip(optimizers, states, strict=True):
        # Replaced groups come from a checkpoint, whose state Lightning restores after this.
        if not held.is_replaced:
            engine.load_full_optimizer_state_dict(held.optimizer, state)
