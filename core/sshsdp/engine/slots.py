"""One slot per managed parameter: where it lives, who holds it, whether it has a gradient yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sshsdp.engine.parameter import SLOT_ATTRIBUTE, ShardedParameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from sshsdp.engine.space import ShardedSpace
    from sshsdp.engine.unit import Unit
    from sshsdp.layout.address_space import Region

__all__ = ["ParameterSlot"]


class ParameterSlot:
    """A model parameter and its place in an address space.

    Attributes:
        name: Canonical FQN (the first in ``named_parameters`` order).
        aliases: All FQNs of a tied parameter, the canonical one first.
        parameter: The ``nn.Parameter`` that the model keeps.
        holders: ``(module, attribute)`` pairs that refer to it.
        was_written: A gradient landed in the current gradient buffer.
        was_used: A gradient landed since the last optimizer step.
    """

    def __init__(
        self,
        name: str,
        aliases: tuple[str, ...],
        parameter: nn.Parameter,
        holders: tuple[tuple[nn.Module, str], ...],
    ) -> None:
        """Describe a parameter; `ShardedSpace` gives it its place."""
        self.name = name
        self.aliases = aliases
        self.parameter = parameter
        self.holders = holders
        self.shape = tuple(parameter.shape)
        self.original_dtype = parameter.dtype
        self.requires_grad = parameter.requires_grad
        self.space: ShardedSpace
        self.region: Region
        self.unit: Unit
        self._enter_backward: Callable[[], None]
        self._on_unwanted_gradient: Callable[[], None]
        self._hook: RemovableHandle | None = None
        self.was_written = False
        self.was_used = False
        self.grad_view: torch.Tensor | None = None
        self._gathered_class = type(parameter)

    @property
    def unit_name(self) -> str:
        """Name of the unit that gathers this parameter, for messages."""
        return self.space.unit_name

    def connect(
        self, enter_backward: Callable[[], None], on_unwanted_gradient: Callable[[], None]
    ) -> None:
        """Take ordinary gradients as they come, and tell the schedule of backwards.

        Args:
            enter_backward: Called whenever a gradient is about to land.
            on_unwanted_gradient: Called when a backward does not ask for this parameter's gradient.
        """
        self._enter_backward = enter_backward
        self._on_unwanted_gradient = on_unwanted_gradient
        if self.space.trainable:
            register: Any = self.parameter.register_post_accumulate_grad_hook
            self._hook = register(self._take_gradient)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self.accept_gradient(gradient)

    def release(self) -> None:
        """Be an ordinary, whole parameter again (the unit must be gathered)."""
        if self._hook is not None:
            self._hook.remove()
        self.show()
        delattr(self.parameter, SLOT_ATTRIBUTE)
        self.parameter.data = self.parameter.data.clone()

    def has_reduced_gradient(self) -> bool:
        """Whether a reduced gradient waits in the update parameters."""
        return any(update.grad is not None for update in self.space.update_tensors)

    def adopt(self, view: torch.Tensor) -> None:
        """Make the model's parameter a view of a gather output. The object stays the same."""
        self.show()
        parameter = self.parameter
        if torch._has_compatible_shallow_copy_type(parameter, view):
            parameter.data = view
        else:
            attributes = dict(parameter.__dict__)
            replacement = type(parameter)(view, requires_grad=self.requires_grad)
            torch.utils.swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]
            parameter.__dict__.update(attributes)
        setattr(parameter, SLOT_ATTRIBUTE, self)
        self.hide()

    def hide(self) -> None:
        """The data is gone: make reads raise."""
        self.parameter.__class__ = ShardedParameter

    def show(self) -> None:
        """The data is there: be an ordinary parameter."""
        self.parameter.__class__ = self._gathered_class

    def is_gradient_wanted(self) -> bool:
        """Whether the running backward accumulates this parameter's gradient.

        ``torch.autograd.grad`` and ``backward(inputs=...)`` may run a module's backward without.
        """
        node = torch.autograd.graph.get_gradient_edge(self.parameter).node
        wanted: bool = torch._C._will_engine_execute_node(node)
        if not wanted:
            self._on_unwanted_gradient()
        return wanted

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """Where a gradient of this parameter goes, and whether one is there already.

        Returns:
            The view of the reduce-scatter input (original shape, reduce dtype), and True if the new
            gradient must be added to it, False if it must overwrite it. The caller has to do so.
        """
        self._enter_backward()
        self.space.allocate_gradient()
        assert self.grad_view is not None
        accumulate = self.was_written
        self.was_written = self.was_used = True
        return self.grad_view, accumulate

    def accept_gradient(self, gradient: torch.Tensor) -> None:
        """Copy or add an ordinary gradient tensor (any floating dtype)."""
        target, accumulate = self.gradient_target()
        if accumulate:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.space.stats.gradient_copy_bytes += target.nbytes
