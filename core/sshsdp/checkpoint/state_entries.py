"""What a model's state dict has: parameters, persistent buffers and extra states, by key."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from sshsdp.assembly.names import named_modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["EXTRA_STATE", "IncompatibleKeys", "StateKind", "state_entries", "take_extra_states"]

# Under this name, a module's state dict has what its get_extra_state() returns.
EXTRA_STATE = "_extra_state"


class IncompatibleKeys(NamedTuple):
    """Keys that a state dict lacks, and keys that it has too many."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class StateKind(Enum):
    """What an entry of a model's state dict is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    EXTRA = "extra state"

    def read(self, module: nn.Module, attribute: str) -> Any:
        """The value, if it is no parameter."""
        assert self is not StateKind.PARAMETER
        if self is StateKind.BUFFER:
            return module._buffers[attribute]
        return module.get_extra_state()


def state_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, StateKind]]:
    """``(key, module, attribute, kind)`` in ``state_dict`` order, persistent ones."""
    for prefix, module in named_modules(model, remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + attribute, module, attribute, StateKind.PARAMETER
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield dot + attribute, module, attribute, StateKind.BUFFER
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield dot + EXTRA_STATE, module, EXTRA_STATE, StateKind.EXTRA


def take_extra_states(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules the extra states that are in ``state``."""
    for key, module, _, kind in state_entries(model):
        if kind is StateKind.EXTRA and key in state:
            module.set_extra_state(state[key])
