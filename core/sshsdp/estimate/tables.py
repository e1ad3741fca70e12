"""A plan as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sshsdp.estimate.costs import FormatCost
from sshsdp.estimate.memory import HOST_KINDS
from sshsdp.estimate.wire import axis_bytes
from sshsdp.layout.report import WORTH_A_WORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from sshsdp.estimate.plan import Plan, Scheme, UnitRow

__all__ = ["MEMORY_KINDS", "plan_tables", "unit_label"]

# Attribute of `RankMemory`, what tables and charts call it.
MEMORY_KINDS = {
    "runtime_shards": "runtime shards",
    "masters": "masters",
    "optimizer_state": "optimizer state",
    "sharded_gradients": "gradients, sharded",
    "unsharded_gradients": "gradients, unsharded",
    "gathered_units": "gathered units",
    "activations": "activations",
}

_GIB = 2**30


def plan_tables(plan: Plan) -> RenderableType:
    """Everything that `sshsdp plan` prints."""
    parts: list[RenderableType] = [_heading(plan), _units(plan), *_notes(plan)]
    parts += [_memory(plan), _wire(plan)]
    if plan.batch is not None:
        parts.append(_time(plan))
    parts += [Text(f"Not counted: {note}") for note in plan.notes]
    return Group(*parts)


def _heading(plan: Plan) -> Text:
    numel = plan.schemes[0].cost.num_parameter_elements
    text = f"{plan.model_name}: {numel / 1e9:,.2f}B parameters on "
    text += f"{plan.layout.num_replicas} x {plan.layout.num_shards} {plan.hardware.name}, "
    text += f"{plan.runtime_format} runtime parameters, {plan.optimizer}"
    if plan.batch is not None:
        batch = plan.batch
        text += f", {batch.size} x {batch.sequence} tokens per rank and micro-batch"
        if batch.num_micro_batches > 1:
            text += f", {batch.num_micro_batches} micro-batches"
    return Text(text, style="bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _scheme_table(plan: Plan, title: str) -> Table:
    names = [scheme.cost.scheme for scheme in plan.schemes]
    meshes = [f"{scheme.cost.num_replicas} x {scheme.cost.num_shards}" for scheme in plan.schemes]
    columns = [f"{name}\n{mesh}" for name, mesh in zip(names, meshes, strict=True)]
    return _table(title, "", *columns)


def unit_label(row: UnitRow) -> str:
    """The name of the first unit of a row, and how many there are."""
    return row.names[0] if len(row.names) == 1 else f"{row.names[0]} (x {len(row.names)})"


def _units(plan: Plan) -> Table:
    table = _table("Units", "unit", "address space", "elements", "bytes gathered", "padding")
    for row in plan.rows:
        label = unit_label(row)
        for space, dtype, trainable, report in zip(
            row.layout.spaces,
            row.layout.runtime_dtypes,
            row.layout.trainable,
            row.reports,
            strict=True,
        ):
            kind = str(dtype).removeprefix("torch.") + ("" if trainable else ", frozen")
            nbytes = FormatCost.of(dtype).gathered_nbytes(space.numel)
            share = f"{report.padding_share:.2%}"
            table.add_row(label, kind, f"{space.numel:,}", _size(nbytes), share)
            label = ""
    return table


def _notes(plan: Plan) -> list[Text]:
    """Why padding is as high as it is, where it is worth a word."""
    return [
        Text(f"{unit_label(row)}: {report}")
        for row in plan.rows
        for report in row.reports
        if report.padding_share >= WORTH_A_WORD
    ]


def _memory(plan: Plan) -> Table:
    table = _scheme_table(plan, "Memory of a rank, GiB")
    for attribute, kind in MEMORY_KINDS.items():
        label = kind
        values = [getattr(scheme.memory, attribute) for scheme in plan.schemes]
        if any(values):
            if plan.schemes[0].memory.is_offloaded and attribute in HOST_KINDS:
                label += " (host)"
            table.add_row(label, *(f"{value / _GIB:.2f}" for value in values))
    table.add_section()
    limit = plan.hardware.memory_bytes
    totals = [
        Text(
            f"{scheme.memory.total / _GIB:.2f}",
            style="bold" if scheme.memory.total <= limit else "bold red",
        )
        for scheme in plan.schemes
    ]
    table.add_row(f"total (of {limit / _GIB:.0f})", *totals)
    if any(scheme.memory.on_host for scheme in plan.schemes):
        on_host = [f"{scheme.memory.on_host / _GIB:.2f}" for scheme in plan.schemes]
        table.add_row("on the host", *on_host)
    return table


def _wire(plan: Plan) -> Table:
    table = _scheme_table(plan, "Bytes that a rank receives per step")
    kinds = dict.fromkeys(kind for scheme in plan.schemes for kind in scheme.wire)
    for axis in ("shard", "replicate", "world"):
        of_axis = [kind for kind in kinds if kind.startswith(f"{axis}/")]
        for kind in of_axis:
            sizes = [_size(scheme.wire.get(kind, 0)) for scheme in plan.schemes]
            table.add_row(f"{axis}: {kind.partition('/')[2].replace('_', '-')}", *sizes)
        if len(of_axis) > 1:
            totals = [_size(axis_bytes(scheme.wire, axis)) for scheme in plan.schemes]
            table.add_row(f"{axis}: together", *totals, style="bold")
        table.add_section()
    return table


def _time(plan: Plan) -> Table:
    table = _scheme_table(plan, "Predicted step")
    rows: dict[str, Callable[[Scheme], str]] = {
        "arithmetic, ms": lambda scheme: _milliseconds(scheme, "compute"),
        "communication not hidden, ms": lambda scheme: _milliseconds(scheme, "exposed"),
        "copies, ms": lambda scheme: _milliseconds(scheme, "copies"),
        "optimizer, ms": lambda scheme: _milliseconds(scheme, "optimizer"),
        "step, ms": lambda scheme: _milliseconds(scheme, "total"),
        "MFU": lambda scheme: f"{scheme.time.mfu:.1%}" if scheme.time else "",
        "tokens/s per rank": lambda scheme: (
            f"{scheme.time.tokens_per_second:,.0f}" if scheme.time else ""
        ),
    }
    for label, value_of in rows.items():
        table.add_row(label, *(value_of(scheme) for scheme in plan.schemes))
    return table


def _milliseconds(scheme: Scheme, attribute: str) -> str:
    return f"{getattr(scheme.time, attribute) * 1e3:,.1f}"


def _size(nbytes: int) -> str:
    if nbytes == 0:
        return "-"
    value = float(nbytes)
    for suffix, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if value < 1024:
            return f"{value:.{digits}f} {suffix}"
        value /= 1024
    return f"{value:.2f} TiB"
