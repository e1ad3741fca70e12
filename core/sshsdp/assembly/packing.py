"""Resolving packs against a model, and running packed linear layers as one."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sshsdp.parameters.zero_copy import linear, runs_by_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sshsdp.packs import Pack
    from sshsdp.parameters.slots import PackSlot, ParameterSlot

__all__ = ["FusedLinears", "fuse_linears", "resolve_packs"]

logger = logging.getLogger(__name__)


def resolve_packs(
    packs: Sequence[Pack], slots: Sequence[ParameterSlot], unit_of: Mapping[ParameterSlot, str]
) -> list[list[ParameterSlot]]:
    """The members of every pack in the model; of a fused one the biases too.

    Raises:
        ValueError: Nothing matches a pack; or members differ in what a pack must share.
    """
    by_name = {alias: slot for slot in slots for alias in slot.aliases}
    resolved: list[list[ParameterSlot]] = []
    taken: dict[ParameterSlot, Pack] = {}
    for pack in packs:
        groups = _groups(pack.names, by_name)
        if not groups:
            raise ValueError(
                f"Pack{pack.names}: no module of the model has all these parameters; its "
                "parameters are "
                f"{', '.join(list(by_name)[:5])}, ..."
            )
        if pack.fuse:
            for members in groups:
                _check_fusable(members)
            biases = tuple(name.removesuffix("weight") + "bias" for name in pack.names)
            groups += _groups(biases, by_name)
        for members in groups:
            _check_members(members, unit_of)
            for member in members:
                if member in taken:
                    raise ValueError(
                        f"parameter {member.name!r} is in two packs: {taken[member]}, {pack}"
                    )
                taken[member] = pack
            resolved.append(members)
    return resolved


def _groups(
    names: tuple[str, ...], by_name: Mapping[str, ParameterSlot]
) -> list[list[ParameterSlot]]:
    first = names[0]
    prefixes = [
        name[: -len(first)] for name in by_name if name == first or name.endswith(f".{first}")
    ]
    candidates = [[by_name.get(prefix + name) for name in names] for prefix in prefixes]
    return [
        members
        for candidate in candidates
        if len(members := [slot for slot in candidate if slot is not None]) == len(names)
    ]


def _check_members(members: Sequence[ParameterSlot], unit_of: Mapping[ParameterSlot, str]) -> None:
    first = members[0]
    rules: dict[str, Callable[[ParameterSlot], Any]] = {
        "unit": unit_of.__getitem__,
        "dtype": lambda slot: slot.original_dtype,
        "requires_grad": lambda slot: slot.requires_grad,
        "shape behind dim 0": lambda slot: slot.shape[1:],
        "number of dims": lambda slot: len(slot.shape),
    }
    for what, value in rules.items():
        for member in members[1:]:
            if value(member) != value(first):
                raise ValueError(
                    f"a pack must share one {what}: {first.name!r} has {value(first)}, "
                    f"{member.name!r} has {value(member)}"
                )
    if not first.shape:
        raise ValueError(f"parameter {first.name!r} is 0-dimensional and cannot be packed")


def _check_fusable(members: Sequence[ParameterSlot]) -> None:
    modules = [_linear_of(member) for member in members]
    if len({module.bias is None for module in modules}) > 1:
        names = ", ".join(repr(member.name) for member in members)
        raise ValueError(f"a fused pack needs a bias in all of its modules, or in none: {names}")


class FusedLinears:
    """Sibling linear modules that run as one GEMM when they get the very same input.

    Whichever sibling is called first with an input computes all outputs; the others take theirs. If
    an input turns out not to be shared, the siblings run on their own from then on.
    """

    def __init__(
        self, modules: Sequence[nn.Linear], weight: PackSlot, bias: PackSlot | None
    ) -> None:
        """Take over the modules' forwards."""
        self.modules = list(modules)
        self._weight = weight
        self._bias = bias
        self._sizes = [module.out_features for module in modules]
        self._input: torch.Tensor | None = None
        self._version = 0
        self._outputs: dict[int, torch.Tensor] = {}
        self._is_shared = True
        # Outputs that nobody took must not outlive the forward, or an aborted recomputation of it.
        self._handle = weight.unit.module.register_forward_hook(
            lambda *_: self._forget(), always_call=True
        )
        for index, module in enumerate(modules):
            module.forward = functools.partial(self._forward, index)  # type: ignore[method-assign]

    def _forward(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        module = self.modules[index]
        if not self._is_shared or not runs_by_rule(module, inputs):
            return linear(module, inputs)
        if inputs is self._input and inputs._version == self._version and index in self._outputs:
            output = self._outputs.pop(index)
            if not self._outputs:
                self._input = None
            return output
        if self._outputs:
            self._stop_sharing()
            return linear(module, inputs)
        bias = None if self._bias is None else self._bias.parameter
        whole = linear(module, inputs, weight=self._weight.parameter, bias=bias)
        self._outputs = dict(enumerate(torch.split(whole, self._sizes, dim=-1)))
        self._input, self._version = inputs, inputs._version
        return self._outputs.pop(index)

    def _stop_sharing(self) -> None:
        self._is_shared = False
        self._forget()
        logger.warning(
            "the linear modules of %s do not get the same input: they run on their own",
            self._weight.name,
        )

    def _forget(self) -> None:
        self._input = None
        self._outputs.clear()

    def remove(self) -> None:
        """Take the hook off; the modules' forwards are restored with the rules."""
        self._forget()
        self._handle.remove()


def fuse_linears(packs: Sequence[Pack], slots: Sequence[PackSlot]) -> list[FusedLinears]:
    """Fuse the modules of the packs that ask for it."""
    wanted = {name for pack in packs if pack.fuse for name in pack.names}
    by_members = {slot.members: slot for slot in slots}
    fused = []
    for slot in slots:
        if not any(slot.members[0].name.endswith(name) for name in wanted):
            continue
        modules = [_linear_of(member) for member in slot.members]
        biases = [module.bias for module in modules if module.bias is not None]
        bias_slot = None
        if biases:
            bias_slot = next(
                candidate
                for members, candidate in by_members.items()
                if members[0].parameter is biases[0]
            )
        fused.append(FusedLinears(modules, slot, bias_slot))
    return fused


def _linear_of(slot: ParameterSlot) -> nn.Linear:
    module, attribute = slot.holders[0]
    if attribute == "weight" and isinstance(module, nn.Linear) and len(slot.holders) == 1:
        return module
    raise ValueError(
        f"parameter {slot.name!r} is in a fused pack, and is not the weight of one nn.Linear"
    )
