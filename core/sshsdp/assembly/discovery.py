"""From a model to slots and units: which parameters there are and who gathers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from sshsdp.assembly.names import named_modules
from sshsdp.assembly.patterns import check_patterns, first_match
from sshsdp.parameters.slots import ParameterSlot, slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    UnitRule = (
        type[nn.Module]
        | str
        | Sequence[type[nn.Module] | str]
        | Callable[[str, nn.Module], bool]
        | None
    )

__all__ = ["ROOT", "collect_slots", "find_unit_modules", "unit_of_slot"]

ROOT = "<root>"


def collect_slots(model: nn.Module) -> list[ParameterSlot]:
    """One slot per parameter, tied ones once, in ``named_parameters`` order.

    Raises:
        RuntimeError: A parameter belongs to an engine already.
        ValueError: A parameter has no fixed shape yet, is sharded by something else, or is complex
            and trained; or its gradients would be sparse.
    """
    names: dict[nn.Parameter, list[str]] = {}
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            _check_parameter(name, parameter)
            if getattr(module, "sparse", False) and parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} of {type(module).__name__}(sparse=True) would get sparse "
                    "gradients, which cannot be reduced in place: build it with sparse=False"
                )
            names.setdefault(parameter, []).append(name)
            if (module, attribute) not in holders.setdefault(parameter, []):
                holders[parameter].append((module, attribute))
    return [
        ParameterSlot(aliases[0], tuple(aliases), parameter, tuple(holders[parameter]))
        for parameter, aliases in names.items()
    ]


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if slot_of(parameter) is not None:
        raise RuntimeError(
            f"parameter {name!r} is sharded already: call sshsdp.shard() once, on the outermost "
            "module, "
            "or engine.close() first"
        )
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"parameter {name!r} has no shape yet (lazy module): run one forward before "
            "sshsdp.shard()"
        )
    if parameter.requires_grad and parameter.is_complex():
        raise ValueError(
            f"parameter {name!r} is {parameter.dtype}: sshsdp trains real parameters; keep "
            "torch.view_as_real() of it instead, or freeze it"
        )
    if isinstance(parameter.data, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor, sharded by something else: give sshsdp.shard() the "
            "plain model"
        )


def find_unit_modules(model: nn.Module, rule: UnitRule) -> dict[str, nn.Module]:
    """The modules that become units, by FQN in registration order; the root is not among them.

    Args:
        model: The model.
        rule: None for every child of every outermost ``nn.ModuleList``; or module classes and name
            patterns; or a callable.

    Raises:
        ValueError: A class or a pattern that matches no module.
        TypeError: Something else was given.
    """
    modules = {name: module for name, module in named_modules(model) if name}
    if rule is None:
        chosen = _children_of_lists(modules)
    elif callable(rule) and not isinstance(rule, type):
        chosen = {name: module for name, module in modules.items() if rule(name, module)}
    else:
        chosen = _by_class_or_pattern(modules, [rule] if isinstance(rule, (str, type)) else rule)
    return {
        name: module
        for name, module in chosen.items()
        if next(module.parameters(), None) is not None
    }


def _children_of_lists(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0])
        is_inside = any(name.startswith(f"{outer}.") for outer in chosen)
        # A container without a forward would never be called, so nothing would gather it.
        has_forward = type(module).forward is not nn.Module.forward
        if isinstance(parent, nn.ModuleList) and has_forward and not is_inside:
            chosen[name] = module
    return chosen


def _by_class_or_pattern(
    modules: dict[str, nn.Module], rule: Sequence[type[nn.Module] | str]
) -> dict[str, nn.Module]:
    classes = tuple(item for item in rule if isinstance(item, type))
    patterns = {item: True for item in rule if isinstance(item, str)}
    if len(classes) + len(patterns) != len(set(rule)):
        raise TypeError(f"units must hold module classes and name patterns, got {rule!r}")
    check_patterns(patterns, modules, "units")
    for wanted in classes:
        if not any(isinstance(module, wanted) for module in modules.values()):
            present = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
            raise ValueError(
                f"units: the model has no module of class {wanted.__name__}; it has "
                f"{', '.join(present)}"
            )
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, classes) or first_match(name, patterns)
    }


def unit_of_slot(slot: ParameterSlot, unit_names: dict[str, nn.Module]) -> str:
    """The innermost unit that contains all uses of a parameter by name, or the root."""
    found = set()
    for alias in slot.aliases:
        containing = [name for name in unit_names if alias.startswith(f"{name}.")]
        found.add(max(containing, key=len, default=ROOT))
    return found.pop() if len(found) == 1 else ROOT
