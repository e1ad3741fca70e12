"""Make ``LightningModule.toggle_optimizer`` reach the parameters that autograd looks at.

Lightning sets ``requires_grad`` on what the optimizers hold. Here those are update parameters, so
the module's two methods are replaced by ones that do the same to the runtime parameters as well.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

from lightning_sshsdp.environment import engine_of, unwrap_optimizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["forward_toggles"]


class _Toggles:
    """Which runtime parameters were trainable before the current toggle."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[nn.Parameter, bool] = {}

    def toggle(self, optimizer: Any) -> None:
        """Only the parameters of ``optimizer`` get gradients."""
        self.restore()
        chosen = unwrap_optimizer(optimizer)
        engine = engine_of(self._module)
        if engine is None:
            return
        for one in engine.optimizers:
            for parameter in itertools.chain(*engine.parameters_of(one)):
                self._before[parameter] = parameter.requires_grad
                if one is not chosen:
                    parameter.requires_grad_(False)

    def restore(self) -> None:
        """As before the toggle."""
        for parameter, requires_grad in self._before.items():
            parameter.requires_grad_(requires_grad)
        self._before.clear()


def forward_toggles(module: Any) -> None:
    """Replace a sharded module's ``toggle_optimizer`` and ``untoggle_optimizer``. Idempotent."""
    if "toggle_optimizer" in module.__dict__:
        return
    toggles = _Toggles(module)
    toggle, untoggle = module.toggle_optimizer, module.untoggle_optimizer

    @functools.wraps(toggle)
    def toggle_optimizer(optimizer: Any) -> None:
        toggle(optimizer)
        toggles.toggle(optimizer)

    @functools.wraps(untoggle)
    def untoggle_optimizer(optimizer: Any) -> None:
        untoggle(optimizer)
        toggles.restore()

    module.toggle_optimizer = toggle_optimizer
    module.untoggle_optimizer = untoggle_optimizer
