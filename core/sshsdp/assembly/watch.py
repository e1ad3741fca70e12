"""Notice when a model is changed after it was sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelWatch"]


class ModelWatch:
    """Remembers which parameters and submodules a model has, and which are trainable."""

    def __init__(self, model: nn.Module) -> None:
        """Take the model as it is now."""
        self._model = model
        self._modules = [
            (name, module, dict(module._parameters), dict(module._modules))
            for name, module in model.named_modules()
        ]
        self._frozen = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        ]

    def check(self) -> None:
        """Compare.

        Raises:
            RuntimeError: A parameter or module was added, removed or replaced, or a parameter that
                was frozen is trainable now.
        """
        for name, module, parameters, children in self._modules:
            if len(module._modules) != len(children):
                self._refuse(f"module {name or '<root>'!r} has other submodules than it had")
            for attribute, child in module._modules.items():
                former = children.get(attribute)
                # Whoever exchanges an activation function changes nothing here.
                if child is not former and (_holds_tensors(child) or _holds_tensors(former)):
                    self._refuse(f"module {f'{name}.{attribute}'.lstrip('.')!r} was replaced")
            if len(module._parameters) != len(parameters):
                self._refuse(f"module {name or '<root>'!r} has other parameters than it had")
            for attribute, parameter in module._parameters.items():
                if parameter is not parameters.get(attribute):
                    self._refuse(f"parameter {f'{name}.{attribute}'.lstrip('.')!r} was replaced")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when sshsdp.shard() ran and is trainable now: "
                    "it has no update "
                    "parameter. Set requires_grad before sshsdp.shard(); freezing later is fine"
                )

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"the model was changed after sshsdp.shard(): {what}. Change the model first, then "
            "shard it"
        )


def _holds_tensors(module: nn.Module | None) -> bool:
    if module is None:
        return False
    found = next(module.parameters(), None), next(module.buffers(), None)
    return any(tensor is not None for tensor in found)
