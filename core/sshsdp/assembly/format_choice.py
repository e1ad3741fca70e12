"""Which runtime format each parameter takes, and why.

With ``RuntimePolicy(format="mxfp8")`` the linear layers of the repeated blocks are in MXFP8:
weights of plain ``nn.Linear`` modules, and packed experts, in every unit but the root, whose last
two dims are multiples of 32. Routers, recognised by their names, stay dense, and so does all the
rest. Patterns in ``RuntimePolicy(formats=...)`` come first.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from sshsdp.assembly.discovery import ROOT
from sshsdp.formats.dense import DenseFormat
from sshsdp.formats.mxfp8 import COMPUTE_DTYPES, MXFP8Format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.policies import RuntimePolicy

__all__ = ["FormatChoice", "choose_formats", "format_table", "takes_mxfp8"]

# Parts of a name that stand for routers and low-rank adapters.
_DENSE_NAMES = ("gate", "*_gate", "*router*", "lora_*")
_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)


class FormatChoice(NamedTuple):
    """A parameter's runtime format.

    Attributes:
        runtime_format: The format.
        reason: Why it is not in MXFP8 where it could be thought to be, or which pattern chose.
    """

    runtime_format: DenseFormat | MXFP8Format
    reason: str = ""


def choose_formats(
    slots: Sequence[ParameterSlot],
    unit_of: Mapping[ParameterSlot, str],
    packs: Sequence[Sequence[ParameterSlot]],
    runtime: RuntimePolicy,
) -> dict[ParameterSlot, FormatChoice]:
    """The runtime format of every parameter.

    Args:
        slots: The parameters.
        unit_of: Name of the unit of each.
        packs: Groups of them that form one tensor; each takes one format.
        runtime: The policy.

    Raises:
        ValueError: An exact name is given a format that it cannot take, or a pack two formats.
    """
    choices = {slot: _choose(slot, unit_of[slot], runtime) for slot in slots}
    for pack in packs:
        formats = {choices[slot].runtime_format for slot in pack}
        if len(formats) == 1:
            continue
        if not any(isinstance(one, MXFP8Format) for one in formats) or _are_named(pack, runtime):
            names = ", ".join(f"{slot.name!r}: {choices[slot].runtime_format}" for slot in pack)
            raise ValueError(f"a pack must share one runtime format: {names}")
        dense = next(slot for slot in pack if not isinstance(choices[slot][0], MXFP8Format))
        for slot in pack:
            reason = choices[slot].reason or f"packed with {dense.name!r}, which is dense"
            choices[slot] = FormatChoice(DenseFormat(runtime.dtype), reason)
    return choices


def _are_named(pack: Sequence[ParameterSlot], runtime: RuntimePolicy) -> bool:
    return any(alias in runtime.formats for slot in pack for alias in slot.aliases)


def _choose(slot: ParameterSlot, unit: str, runtime: RuntimePolicy) -> FormatChoice:
    dense = DenseFormat(runtime.dtype)
    matches = [
        (pattern, runtime_format)
        for alias in slot.aliases
        for pattern, runtime_format in runtime.formats.items()
        if fnmatchcase(alias, pattern)
    ]
    problem = _why_not(slot, dense)
    for pattern, chosen in matches:
        if isinstance(chosen, DenseFormat):
            return FormatChoice(chosen, f"pattern {pattern!r}")
        if problem is None:
            return FormatChoice(chosen, f"pattern {pattern!r}")
        if pattern in slot.aliases:
            raise ValueError(
                f"RuntimePolicy.formats[{pattern!r}]: parameter {slot.name!r} of shape "
                f"{slot.shape} cannot be in MXFP8: {problem}. Leave it out, or give it a "
                "sshsdp.DenseFormat"
            )
        # A wildcard that also catches norms says nothing about them.
    if runtime.format is None:
        return FormatChoice(dense, (problem or "") if matches else "")
    problem = problem or _why_not_by_default(slot, unit)
    assert isinstance(runtime.format, MXFP8Format)
    return FormatChoice(dense, problem) if problem else FormatChoice(runtime.format)


def takes_mxfp8(slot: ParameterSlot, unit: str) -> bool:
    """Whether a parameter is in MXFP8 if no pattern says otherwise."""
    return not (_why_not(slot, DenseFormat()) or _why_not_by_default(slot, unit))


def _why_not(slot: ParameterSlot, dense: DenseFormat) -> str | None:
    """What rules a parameter out, whoever asks for it."""
    problem = MXFP8Format.why_not(slot.shape)
    if problem is not None:
        return problem
    dtype = dense.runtime_dtype(slot.original_dtype)
    if dtype not in COMPUTE_DTYPES:
        return f"computes in {dtype}, and MXFP8 does in bfloat16, float32 or float64"
    for module, _ in slot.holders:
        if isinstance(module, _LOOKED_UP):
            return f"{type(module).__name__} does not multiply it as a matrix"
    return None


def _why_not_by_default(slot: ParameterSlot, unit: str) -> str | None:
    """What keeps a parameter dense unless a pattern says otherwise."""
    if unit == ROOT:
        return "in the root unit"
    parts = slot.name.split(".")
    if any(fnmatchcase(part, name) for part in parts for name in _DENSE_NAMES):
        return "a router or an adapter, by its name"
    for module, attribute in slot.holders:
        kind = type(module).__name__
        if len(slot.shape) == 3:
            is_expert = any("expert" in part.lower() for part in (*parts, kind))
            if not is_expert or getattr(module, "is_transposed", False):
                return f"{kind} is not known for experts of shape [experts, out, in]"
        elif type(module) is not nn.Linear or attribute != "weight":
            return f"{kind} is no plain nn.Linear"
    return None


def format_table(choices: Mapping[ParameterSlot, FormatChoice]) -> str:
    """The choices as a table, one line for parameters that differ in numbers of their names only.

    Parameters of no more than one dim are left out: they are always dense.
    """
    counts: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    for slot, choice in choices.items():
        if len(slot.shape) > 1:
            label = _short(choice.runtime_format, slot)
            key = (_pattern(slot.name), slot.shape, label, _pattern(choice.reason))
            counts[key] = counts.get(key, 0) + 1
    rows = [
        (f"{name} x {count}" if count > 1 else name, str(shape), label, reason)
        for (name, shape, label, reason), count in counts.items()
    ]
    return _aligned([("parameter", "shape", "format", "why"), *rows])


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", text)


def _short(runtime_format: DenseFormat | MXFP8Format, slot: ParameterSlot) -> str:
    if isinstance(runtime_format, MXFP8Format):
        return "mxfp8"
    return str(runtime_format.runtime_dtype(slot.original_dtype)).removeprefix("torch.")


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
