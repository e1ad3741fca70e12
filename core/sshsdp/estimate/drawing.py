"""A plan as a picture: the address space of one unit, and memory beside the peers'."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

from sshsdp.estimate.memory import HOST_KINDS
from sshsdp.estimate.tables import MEMORY_KINDS, unit_label

if TYPE_CHECKING:
    from pathlib import Path

    from sshsdp.estimate.plan import Plan, UnitRow
    from sshsdp.layout.address_space import AddressSpace

__all__ = ["draw_plan"]

_GIB = 2**30
_INK, _MUTED, _CUT = "#1f2933", "#7b8794", "#111827"
_REGION_COLOURS = (
    "#4e79a7",
    "#76a5cf",
    "#a0cbe8",
    "#59a14f",
    "#8cd17d",
    "#f28e2b",
    "#ffbe7d",
    "#b6992d",
    "#f1ce63",
    "#9c755f",
)
_UPDATE_COLOURS = ("#e8e3f4", "#c9bfe6")
_UPDATE_MARK = "#6f4fb3"
_MEMORY_COLOURS = {
    "runtime_shards": "#4e79a7",
    "masters": "#6f4fb3",
    "optimizer_state": "#b39ddb",
    "sharded_gradients": "#e15759",
    "unsharded_gradients": "#ff9d9a",
    "gathered_units": "#59a14f",
    "activations": "#d3c7ae",
}
# A label needs about this share of the width per character.
_CHARACTER = 0.0078


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of ``path`` chooses the kind of file.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: The kind of file is not known.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot needs matplotlib: pip install 'sshsdp[plots]' (or pip install matplotlib)"
        ) from error
    figure = Figure(figsize=(12, 7.6), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2, 1, height_ratios=(1.55, 1), hspace=0.24, left=0.1, right=0.975, top=0.93, bottom=0.075
    )
    row, index = _largest_space(plan)
    _draw_space(figure.add_subplot(grid[0]), plan, row, index)
    _draw_memory(figure.add_subplot(grid[1]), plan)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"--plot {path}: {error}") from error


def _largest_space(plan: Plan) -> tuple[UnitRow, int]:
    """The largest space of the unit that there is most of."""
    row = max(plan.rows, key=lambda row: (len(row.names), row.layout.runtime_nbytes))
    sizes = [space.numel for space in row.layout.spaces]
    return row, sizes.index(max(sizes))


def _draw_space(axes: Any, plan: Plan, row: UnitRow, index: int) -> None:
    space = row.layout.spaces[index]
    dtype = str(row.layout.runtime_dtypes[index]).removeprefix("torch.")
    axes.set_xlim(-0.002, 1.002)
    axes.set_ylim(-0.02, 1.04)
    axes.axis("off")
    axes.set_title(
        f"One address space, two layouts: {plan.model_name}, {unit_label(row)}, on "
        f"{plan.layout.num_replicas} x {plan.layout.num_shards} ranks",
        loc="left",
        fontsize=12.5,
        color=_INK,
        fontweight="bold",
    )
    colours = _colours(space)
    _draw_whole(axes, plan, space, colours, dtype, str(row.reports[index]))
    _draw_shard(axes, plan, space, colours, dtype)


def _colours(space: AddressSpace) -> dict[str, str]:
    return {
        region.name: _REGION_COLOURS[i % len(_REGION_COLOURS)]
        for i, region in enumerate(space.regions)
    }


def _draw_whole(
    axes: Any,
    plan: Plan,
    space: AddressSpace,
    colours: dict[str, str],
    dtype: str,
    padding: str,
) -> None:
    """The gathered unit above, all update shards below."""
    for region in space.regions:
        box = (region.start / space.numel, region.numel / space.numel, 0.78, 0.17)
        _box(axes, box, colours[region.name], ())
        name = _short(region.name)
        labels = (f"{name}, transposed", name) if region.transposed else (name,)
        start, stop = _widest_part(space, region.start, region.stop)
        widest = (start / space.numel, (stop - start) / space.numel, 0.78, 0.17)
        if not _label(axes, widest, labels):
            # Across the cuts, on a ground of its own.
            _label(axes, box, labels, ground=colours[region.name])
    for start, stop in space.gaps:
        box = (start / space.numel, (stop - start) / space.numel, 0.78, 0.17)
        _box(axes, box, "#ffffff", (), hatch="////")
    slices = _slices(plan)
    count = space.num_shards * slices
    for part in range(count):
        _box(axes, (part / count, 1 / count, 0.64, 0.09), _UPDATE_COLOURS[part % 2], (), edge=0.0)
    for cut in range(space.num_shards + 1):
        thickness = min(1.1, 30 / space.num_shards)
        axes.plot([cut / space.num_shards] * 2, [0.625, 0.97], color=_CUT, lw=thickness, zorder=4)
    for shard in _labelled(space.num_shards):
        middle = (shard + 0.5) / space.num_shards
        axes.text(middle, 0.985, f"shard {shard}", ha="center", fontsize=8, color=_MUTED)
    _side(axes, 0.865, "runtime", f"parameters\n{dtype}")
    _side(axes, 0.685, "update", f"{count} equal\nshards")
    axes.text(1.0, 0.595, padding.partition(":")[0], ha="right", fontsize=8.5, color=_MUTED)


def _widest_part(space: AddressSpace, start: int, stop: int) -> tuple[int, int]:
    """The largest part of a range that no shard cut divides, the first of those that tie."""
    inner = range((start // space.shard_numel + 1) * space.shard_numel, stop, space.shard_numel)
    edges = [start, *inner, stop]
    return max(itertools.pairwise(edges), key=lambda part: part[1] - part[0])


def _slices(plan: Plan) -> int:
    return plan.schemes[0].cost.num_update_slices


def _labelled(num_shards: int) -> range:
    """Shards with room for a label."""
    return range(0, num_shards, -(-num_shards // 16))


def _draw_shard(
    axes: Any, plan: Plan, space: AddressSpace, colours: dict[str, str], dtype: str
) -> None:
    """One shard, enlarged: what it holds of which parameter, and its update shards."""
    shard = _most_telling_shard(space)
    low, high = space.shard_range(shard)
    for edge, side in ((low, 0.0), (high, 1.0)):
        axes.plot(
            [edge / space.numel, side],
            [0.625, 0.44],
            color=_MUTED,
            lw=0.9,
            ls=(0, (4, 3)),
            zorder=1,
        )
    width = high - low
    for piece in space.pieces(low, high):
        box = (piece.offset / width, piece.numel / width, 0.27, 0.17)
        rows = _row_range(piece.shape, piece.start, piece.stop, is_transposed=piece.transposed)
        name = _short(piece.name)
        _box(axes, box, colours[piece.name], (name + rows, name))
    slices = _slices(plan)
    alike = "one rank" if plan.layout.num_replicas == 1 else "all replicas alike"
    for part in range(slices):
        place = (part / slices, 1 / slices, 0.11, 0.11)
        label = (f"replica {part}", f"{part}") if slices > 1 else (alike,)
        _box(axes, place, _UPDATE_COLOURS[part % 2], label, colour=_UPDATE_MARK)
    axes.plot([0, 0, 1, 1, 0], [0.11, 0.44, 0.44, 0.11, 0.11], color=_CUT, lw=1.3, zorder=4)
    _side(axes, 0.355, f"shard {shard}", f"enlarged\n{dtype}")
    _side(axes, 0.165, "update", "masters and\noptimizer state")
    text = "Each rank updates its slice and publishes it into the runtime shard; the slices come "
    text += "together over replicate, the shards over shard. Nothing is copied in or out."
    if slices == 1:
        text = "Each rank updates its shard and publishes it in the runtime format; the shards "
        text += "come together over shard. Nothing is copied in or out."
    axes.text(0, 0.03, text, fontsize=9, color=_INK)


def _most_telling_shard(space: AddressSpace) -> int:
    """The shard with the most parameters in it, the first of those that tie."""
    counts = [len(space.pieces(*space.shard_range(s))) for s in range(space.num_shards)]
    return counts.index(max(counts))


def _row_range(shape: tuple[int, ...], start: int, stop: int, *, is_transposed: bool) -> str:
    """Which rows (or columns, if stored transposed) of a parameter a piece covers."""
    if len(shape) < 2 or stop - start == math.prod(shape):
        return ""
    side = shape[-2] if is_transposed else shape[-1]
    name = "columns" if is_transposed else "rows"
    return f" {name} {start // side}:{-(-stop // side)}"


def _box(
    axes: Any,
    box: tuple[float, float, float, float],
    fill: str,
    labels: tuple[str, ...],
    *,
    colour: str = _INK,
    edge: float = 0.6,
    hatch: str = "",
) -> None:
    """A rectangle ``(x, width, y, height)`` with a label."""
    from matplotlib.patches import Rectangle

    x, width, y, height = box
    rectangle = Rectangle(
        (x, y),
        width,
        height,
        facecolor=fill,
        edgecolor="#c3cad2" if hatch else "white",
        lw=edge,
        hatch=hatch,
        zorder=2,
    )
    axes.add_patch(rectangle)
    _label(axes, box, labels, colour)


def _label(
    axes: Any,
    box: tuple[float, float, float, float],
    labels: tuple[str, ...],
    colour: str = _INK,
    *,
    ground: str | None = None,
) -> bool:
    """Write the first of ``labels`` that has room in a box; returns whether one had."""
    x, width, y, height = box
    for label in labels:
        if len(label) * _CHARACTER <= width:
            axes.text(
                x + width / 2,
                y + height / 2,
                label,
                ha="center",
                va="center",
                fontsize=8.5,
                color=colour,
                zorder=5,
                bbox=None if ground is None else {"fc": ground, "ec": "none", "pad": 1.5},
            )
            return True
    return False


def _side(axes: Any, y: float, title: str, detail: str) -> None:
    axes.text(
        -0.012,
        y + 0.025,
        title,
        ha="right",
        va="center",
        fontsize=9.5,
        fontweight="bold",
        color=_INK,
    )
    axes.text(-0.012, y - 0.045, detail, ha="right", va="center", fontsize=8, color=_MUTED)


def _short(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` to ``q_proj``."""
    parts = [part for part in re.split(r"\.", name) if part != "weight"]
    if parts[-1] == "bias" and len(parts) > 1:
        return f"{parts[-2]}.bias"
    return parts[-1]


def _draw_memory(axes: Any, plan: Plan) -> None:
    labels = []
    widest = max(scheme.memory.total for scheme in plan.schemes) / _GIB
    for position, scheme in enumerate(plan.schemes):
        cost = scheme.cost
        name = "classic HSDP" if cost.scheme == "HSDP" else cost.scheme
        labels.append(f"{name}\n{cost.num_replicas} x {cost.num_shards}")
        left = 0.0
        for kind in _shown_kinds(plan):
            colour = _MEMORY_COLOURS[kind]
            value = getattr(scheme.memory, kind) / _GIB
            axes.barh(
                position, value, left=left, height=0.62, color=colour, edgecolor="white", lw=0.6
            )
            left += value
        axes.text(
            left + 0.004 * widest,
            position,
            f"{left:.1f} GiB",
            va="center",
            fontsize=9.5,
            color=_INK,
            zorder=5,
            bbox={"fc": "white", "ec": "none", "pad": 1.0},
        )
    limit = plan.hardware.memory_bytes / _GIB
    is_near = limit < 1.6 * widest
    if is_near:
        axes.axvline(limit, color="#c0392b", lw=1.2, ls=(0, (5, 3)))
        axes.text(limit, 0.53, f" {plan.hardware.name}", color="#c0392b", fontsize=8.5)
    axes.set_xlim(0, max(widest * 1.12, limit * 1.06 if is_near else 0.0))
    axes.set_yticks(range(len(labels)), labels, fontsize=9.5)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each rank, peaks included", fontsize=9, color=_MUTED)
    axes.tick_params(axis="x", labelsize=8.5, colors=_MUTED)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.set_title(
        f"Memory of a rank: {plan.optimizer}, {plan.runtime_format} runtime parameters",
        loc="left",
        fontsize=12.5,
        color=_INK,
        fontweight="bold",
        pad=22,
    )
    _draw_legend(axes, plan)


def _shown_kinds(plan: Plan) -> list[str]:
    """Kinds of memory that any scheme has on the accelerator."""
    is_offloaded = plan.schemes[0].memory.is_offloaded
    return [
        kind
        for kind in _MEMORY_COLOURS
        if not (is_offloaded and kind in HOST_KINDS)
        and any(getattr(scheme.memory, kind) for scheme in plan.schemes)
    ]


def _draw_legend(axes: Any, plan: Plan) -> None:
    from matplotlib.patches import Patch

    kinds = _shown_kinds(plan)
    axes.legend(
        handles=[Patch(color=_MEMORY_COLOURS[kind], label=MEMORY_KINDS[kind]) for kind in kinds],
        loc="lower left",
        bbox_to_anchor=(-0.008, 0.985),
        ncols=len(kinds),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.3,
    )
