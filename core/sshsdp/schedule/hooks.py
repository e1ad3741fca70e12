"""Module and autograd hooks that tell the schedule where a model stands.

A unit's module gathers before its forward, frees after it, and has its outputs hooked for backward.
Every other module that holds parameters directly makes sure that they are there, so that parts of a
model may be called on their own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_map_only

from sshsdp.parameters.reads import Reads
from sshsdp.spaces.unit import UnitState

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from sshsdp.schedule.schedule import Schedule
    from sshsdp.spaces.unit import Unit

__all__ = ["ModuleHooks"]


def _is_in_backward() -> bool:
    # A forward inside a backward is the recomputation of a checkpointed activation.
    return torch._C._current_graph_task_id() != -1


def _leaves(value: Any) -> list[Any]:
    """Leaves of nested containers, dataclass instances included."""
    found = []
    for leaf in tree_flatten(value)[0]:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [getattr(leaf, item.name) for item in dataclasses.fields(leaf)]
            found += [inner for item in fields for inner in _leaves(item)]
        else:
            found.append(leaf)
    return found


def _differentiable(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _is_opaque(leaf: Any) -> bool:
    return leaf is not None and not isinstance(leaf, (torch.Tensor, bool, int, float, str, bytes))


def _call_before_backward(tensor: torch.Tensor, callback: Callable[[Any], None]) -> None:
    # The node's hooks run after the tensor's: if the tensor is the next unit's input, that unit's
    # end of backward (a tensor hook) comes first, and frees it before this one is gathered.
    if tensor.grad_fn is None:
        tensor.register_hook(callback)  # type: ignore[no-untyped-call]
    else:
        tensor.grad_fn.register_prehook(callback)


class ModuleHooks:
    """Installs the hooks of all units and removes them again."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        cast_inputs_to: torch.dtype | None,
        check_model: Callable[[], None],
    ) -> None:
        """Install.

        Args:
            schedule: What the hooks drive.
            cast_inputs_to: Dtype of floating-point inputs of the root module, None to leave them.
            check_model: Called before the root module's forward; raises if the model was changed.
        """
        self._schedule = schedule
        self._cast_inputs_to = cast_inputs_to
        self._check_model = check_model
        self._handles: list[RemovableHandle] = []
        for unit in schedule.units:
            self._hook_unit(unit)
            self._hook_holders(unit)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_unit(self, unit: Unit) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._after_forward(unit, output)

        def close(module: nn.Module, args: Any, output: Any) -> None:
            if not _is_in_backward():
                self._schedule.close_pass()

        # A compiler may trace modules, not what moves their parameters.
        disable: Any = torch.compiler.disable
        module = unit.module
        self._handles.append(
            module.register_forward_pre_hook(disable(before), prepend=True, with_kwargs=True)
        )
        self._handles.append(module.register_forward_hook(disable(after)))
        if unit.is_root:
            self._handles.append(module.register_forward_hook(disable(close), always_call=True))

    def _hook_holders(self, unit: Unit) -> None:
        def before(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if _is_in_backward():
                self._schedule.note_recomputation(unit)
            if unit.state is not UnitState.GATHERED or not unit.has(Reads.FORWARD):
                self._gather_out_of_turn(unit)

        holders = [module for slot in unit.slots for module, _ in slot.holders]
        for module in dict.fromkeys(holders):
            if module is not unit.module:
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))

    def _gather_out_of_turn(self, unit: Unit) -> None:
        if unit.state is UnitState.GATHERED:
            # Gathered for a backward that turns out to run a part of the forward again.
            unit.wait(Reads.FORWARD)
            return
        # No output is hooked here, so nothing would bring the parameters back in backward.
        has_grad = torch.is_grad_enabled()
        unit.wait(Reads.BOTH if has_grad else Reads.FORWARD)
        unit.kept_for_backward |= has_grad
        self._schedule.note_peaks()

    def _before_forward(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        schedule = self._schedule
        is_recompute = _is_in_backward()
        if unit.is_root and not is_recompute:
            self._check_model()
            schedule.open_pass()
            args, kwargs = self._cast((args, kwargs))
        schedule.before_forward(unit, is_recompute=is_recompute)
        if torch.is_grad_enabled() and (not is_recompute or unit.num_expected_recomputes > 0):
            if is_recompute:
                unit.num_expected_recomputes -= 1
            unit.num_pending_backwards += 1
            unit.hooks_outputs = True
            tensors = _differentiable(_leaves((args, kwargs)))
            if tensors and not unit.is_root:
                has_leaf = any(tensor.grad_fn is None for tensor in tensors)
                register_multi_grad_hook(
                    tensors, lambda _: schedule.after_backward(unit, is_certain=not has_leaf)
                )
        else:
            unit.hooks_outputs = False
        return args, kwargs

    def _after_forward(self, unit: Unit, output: Any) -> None:
        schedule = self._schedule
        if torch.is_grad_enabled() and unit.hooks_outputs:
            leaves = _leaves(output)
            pass_id = schedule.pass_id
            tensors = _differentiable(leaves)
            for tensor in tensors:
                _call_before_backward(tensor, lambda _: schedule.before_backward(unit, pass_id))
            if any(_is_opaque(leaf) for leaf in leaves):
                unit.kept_for_backward = True
                unit.gather(Reads.BOTH)
            elif not tensors:
                schedule.note_detached(unit)
        if not _is_in_backward():
            if not torch.is_grad_enabled():
                schedule.note_detached(unit)
            schedule.after_forward(unit)

    def _cast(self, inputs: Any) -> Any:
        dtype = self._cast_inputs_to
        if dtype is None:
            return inputs
        return tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs
        )
