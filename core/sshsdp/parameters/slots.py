"""Slots: where a runtime tensor lives and whether it has a gradient yet.

A `ParameterSlot` stands for one parameter of the model, a `PackSlot` for the contiguous tensor that
several of them form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sshsdp.layout.address_space import Region
from sshsdp.layout.cuts import Granularity, elements
from sshsdp.parameters.sharded import SLOT_ATTRIBUTE, ShardedParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.parameters.reads import Reads

__all__ = ["GradientSlot", "HomeSpace", "HomeUnit", "PackSlot", "ParameterSlot", "slot_of"]


class HomeSpace(Protocol):
    """What a slot asks of the address space that it lives in (`sshsdp.spaces` has them)."""

    @property
    def unit_name(self) -> str:
        """Name of the unit, for messages."""

    @property
    def trainable(self) -> bool:
        """Whether its parameters get gradients."""

    @property
    def runtime_dtype(self) -> torch.dtype:
        """What the parameters pass for."""

    @property
    def update_dtype(self) -> torch.dtype:
        """Of the masters."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the gradient buffer."""

    @property
    def device(self) -> torch.device:
        """Where gathered parameters live."""

    @property
    def runtime(self) -> Any:
        """The gathered parameters in their format; it knows their class."""

    def has_reduced_gradient(self) -> bool:
        """Whether a reduced gradient waits in the update parameters."""

    def allocate_gradient(self) -> None:
        """Have a gradient buffer that may be written, and every slot's ``grad_view``."""

    def count_gradient_copy(self, nbytes: int) -> None:
        """Note that a gradient had to be copied into the buffer."""


class HomeUnit(Protocol):
    """What a slot asks of the unit that gathers it."""

    @property
    def module(self) -> nn.Module:
        """The module whose forward gathers it."""

    def wait(self, reads: Reads) -> None:
        """Have the parameters."""


def slot_of(parameter: object) -> GradientSlot | None:
    """The slot of a parameter that an engine manages, else None."""
    return getattr(parameter, SLOT_ATTRIBUTE, None)


class GradientSlot:
    """A runtime tensor over a gather output whose gradient lands in the reduce input.

    Attributes:
        name: FQN, for messages.
        parameter: The leaf that kernels read.
        space: The address space it lives in.
        unit: The unit that gathers it.
        grad_view: Its view of the gradient buffer, once there is one.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        """Name a tensor; its space and its unit give it its place."""
        self.name = name
        self.parameter = parameter
        self.space: HomeSpace
        self.unit: HomeUnit
        self.grad_view: torch.Tensor | None = None
        self._enter_backward: Callable[[], None]
        self._on_unwanted_gradient: Callable[[], None]
        self._hook: RemovableHandle | None = None
        self._original_class = type(parameter)

    @property
    def place(self) -> Region:
        """Its region of the address space."""
        raise NotImplementedError

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
            self._hook = register(_take_gradient)

    def has_reduced_gradient(self) -> bool:
        """Whether a reduced gradient waits in the update parameters."""
        return self.space.has_reduced_gradient()

    def adopt(self, view: torch.Tensor) -> None:
        """Make the parameter a view of a gather output. The object stays the same."""
        parameter = self.parameter
        parameter.__class__ = self._original_class
        if torch._has_compatible_shallow_copy_type(parameter, view):
            parameter.data = view
        else:
            attributes = dict(parameter.__dict__)
            replacement = type(parameter)(view, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]
            parameter.__dict__.update(attributes)
        setattr(parameter, SLOT_ATTRIBUTE, self)
        self.hide()

    def hide(self) -> None:
        """The data is gone: make reads raise."""
        self.parameter.__class__ = ShardedParameter

    def show(self) -> None:
        """The data is there: be an ordinary parameter, or what the runtime format makes of it."""
        self.parameter.__class__ = self.space.runtime.parameter_class or self._original_class

    def is_gradient_wanted(self) -> bool:
        """Whether the running backward accumulates this parameter's gradient.

        ``torch.autograd.grad`` and ``backward(inputs=...)`` may run a module's backward without.
        """
        with torch._C.DisableTorchFunctionSubclass():
            node = torch.autograd.graph.get_gradient_edge(self.parameter).node
        wanted: bool = torch._C._will_engine_execute_node(node)
        if not wanted:
            self._on_unwanted_gradient()
        return wanted

    @property
    def was_written(self) -> bool:
        """Whether a gradient is in the gradient buffer."""
        raise NotImplementedError

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """Where a gradient of this tensor goes, and whether one is there already.

        Returns:
            The view of the reduce-scatter input (the tensor's shape, reduce dtype), and True if the
            new gradient must be added to it, False if it must overwrite it. The caller has to do
            so.
        """
        raise NotImplementedError

    def _gradient_view(self) -> torch.Tensor:
        self._enter_backward()
        self.space.allocate_gradient()
        assert self.grad_view is not None
        return self.grad_view

    def accept_gradient(self, gradient: torch.Tensor) -> None:
        """Copy or add an ordinary gradient tensor (any floating dtype).

        Raises:
            RuntimeError: The gradient is sparse.
        """
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {self.name!r} got a gradient of layout {gradient.layout}: only dense "
                "gradients can be reduced"
            )
        target, accumulate = self.gradient_target()
        if accumulate:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.space.count_gradient_copy(target.nbytes)


def _take_gradient(parameter: torch.Tensor) -> None:
    # Finds the slot through the parameter: a hook that held the slot would hold the engine and its
    # process groups for ever, as Python's collector does not see the hooks that torch keeps.
    slot = slot_of(parameter)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and slot is not None:
            slot.accept_gradient(gradient)


class ParameterSlot(GradientSlot):
    """A model parameter and its place in an address space.

    Attributes:
        name: Canonical FQN (the first in ``named_parameters`` order).
        aliases: All FQNs of a tied parameter, the canonical one first.
        parameter: The ``nn.Parameter`` that the model keeps.
        holders: ``(module, attribute)`` pairs that refer to it.
        granularity: How finely its optimizer lets it be cut.
        cuts: Where shards may cut it, as its optimizer asks for.
        block: Elements that its optimizer quantizes together, 1 if none: its region starts at a
            multiple of so many elements.
        optimization_units: What a matrix optimizer takes for one matrix each.
        is_written: A gradient landed in the current gradient buffer.
        was_used: A gradient landed since the last optimizer step.
    """

    def __init__(
        self,
        name: str,
        aliases: tuple[str, ...],
        parameter: nn.Parameter,
        holders: tuple[tuple[nn.Module, str], ...],
    ) -> None:
        """Describe a parameter; its space gives it its place."""
        super().__init__(name, parameter)
        self.aliases = aliases
        self.holders = holders
        self.shape = tuple(parameter.shape)
        self.original_dtype = parameter.dtype
        self.requires_grad = parameter.requires_grad
        self.granularity: Granularity = "element"
        self.cuts = elements()
        self.block = 1
        self.optimization_units: tuple[OptimizationUnit, ...] = ()
        self.region: Region
        self.is_written = False
        self.was_used = False

    @property
    def place(self) -> Region:
        """See `GradientSlot.place`."""
        return self.region

    def release(self, values: torch.Tensor) -> None:
        """Be an ordinary, whole parameter again.

        Args:
            values: A view of memory that goes.
        """
        if self._hook is not None:
            self._hook.remove()
        parameter = self.parameter
        parameter.__class__ = self._original_class
        delattr(parameter, SLOT_ATTRIBUTE)
        parameter.data = values.clone()

    @property
    def was_written(self) -> bool:
        """Whether a gradient is in the gradient buffer."""
        return self.is_written

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """See `GradientSlot.gradient_target`."""
        target = self._gradient_view()
        accumulate = self.is_written
        self.is_written = self.was_used = True
        return target, accumulate


class PackSlot(GradientSlot):
    """Neighbouring parameters as one runtime tensor: ``[sum of dim 0, ...]``.

    Its leaf is no parameter of the model; its gradient is the members' gradients, in the same
    memory.

    Attributes:
        members: The parameters, in pack order.
    """

    def __init__(self, members: Sequence[ParameterSlot], space: HomeSpace) -> None:
        """Stand for parameters of ``space``; `adopt` makes the leaf a view of them."""
        leaf = nn.Parameter(
            torch.empty(0, dtype=space.runtime_dtype, device=space.device),
            requires_grad=space.trainable,
        )
        super().__init__("+".join(member.name for member in members), leaf)
        self.space = space
        self.members = tuple(members)

    @property
    def place(self) -> Region:
        """See `GradientSlot.place`: the members' regions as one."""
        first = self.members[0].region
        num_rows = sum(member.shape[0] for member in self.members)
        return Region(name=self.name, start=first.start, shape=(num_rows, *first.shape[1:]))

    def follow_members(self) -> None:
        """Belong to the members' unit and report to whom they report."""
        first = self.members[0]
        self.unit = first.unit
        self.connect(first._enter_backward, first._on_unwanted_gradient)

    @property
    def was_written(self) -> bool:
        """Whether a gradient of some member is in the gradient buffer."""
        return any(member.is_written for member in self.members)

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """See `GradientSlot.gradient_target`."""
        target = self._gradient_view()
        accumulate = self.was_written
        for member in self.members:
            if accumulate and not member.is_written:
                assert member.grad_view is not None
                member.grad_view.zero_()
            member.is_written = member.was_used = True
        return target, accumulate
