"""Meta parameters and buffers: give them memory and their modules' initial values."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sshsdp.parameters.sharded import ShardedParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["holds_meta", "initial_value", "materialize"]


def holds_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of the model is on the meta device."""
    return any(t.is_meta for t in model.parameters()) or any(t.is_meta for t in model.buffers())


def materialize(
    model: nn.Module,
    modules: Sequence[nn.Module],
    slots: Sequence[ParameterSlot],
    device: torch.device,
) -> None:
    """Allocate the meta tensors that ``modules`` hold directly and initialise those modules.

    A module is initialised by its ``reset_parameters()``, then by the ``_init_weights(module)`` of
    the nearest enclosing module that has one (transformers' models), as far as they exist.
    Parameter objects stay the same.

    Raises:
        ValueError: A module has meta tensors and no way to initialise them.
    """
    touched = []
    for slot in slots:
        if slot.parameter.is_meta:
            _give_memory(slot.parameter, device)
            touched += [module for module, _ in slot.holders]
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
                touched.append(module)
    for module in dict.fromkeys(touched):
        with torch.no_grad(), _stand_ins(module, device):
            _initializer(model, module)()


def initial_value(model: nn.Module, slot: ParameterSlot, device: torch.device) -> torch.Tensor:
    """The value that its module gives to a sharded parameter, whole.

    Raises:
        ValueError: The module has no way to initialise it.
    """
    module, attribute = slot.holders[0]
    with torch.no_grad(), _stand_ins(module, device):
        _initializer(model, module)()
        return module._parameters[attribute].detach()  # type: ignore[union-attr]  # has a slot


@contextlib.contextmanager
def _stand_ins(module: nn.Module, device: torch.device) -> Iterator[None]:
    # A tied parameter may belong to a unit that is sharded by now, with its first value.
    sharded = {
        name: parameter
        for name, parameter in module._parameters.items()
        if isinstance(parameter, ShardedParameter)
    }
    for name, parameter in sharded.items():
        empty = torch.empty_like(parameter, device=device)
        module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(sharded)


def _give_memory(parameter: nn.Parameter, device: torch.device) -> None:
    attributes = dict(parameter.__dict__)
    empty = nn.Parameter(
        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    torch.utils.swap_tensors(parameter, empty)  # type: ignore[no-untyped-call]
    parameter.__dict__.update(attributes)


def _initializer(model: nn.Module, module: nn.Module) -> Callable[[], Any]:
    reset = getattr(module, "reset_parameters", None)
    names = {inner: name for name, inner in model.named_modules()}
    name = names[module]
    init_weights = None
    while init_weights is None:
        init_weights = getattr(model.get_submodule(name), "_init_weights", None)
        if not name:
            break
        name = name.rpartition(".")[0]
    if reset is not None or init_weights is not None:

        def initialize() -> None:
            # The model's rule need not know every module: what it leaves out keeps the module's.
            if reset is not None:
                reset()
            if init_weights is not None:
                init_weights(module)

        return initialize
    raise ValueError(
        f"module {names[module]!r} ({type(module).__name__}) has parameters or buffers on the "
        "meta device and "
        "no reset_parameters() to initialise them: add one, or build the model on a real device"
    )
