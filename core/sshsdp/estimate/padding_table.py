"""The padding of one block of well-known models, as a Markdown table for the docs.

``python -m sshsdp.estimate.padding_table docs/configs/*.json`` prints what ``docs/planning.md``
holds.

Padding is what a gathered block has beyond its parameters, over the parameters. The rules:

* ours, cuts anywhere: elementwise optimizers and dense formats;
* ours, whole rows: what optimizers ask for that work on rows, on the side that is longer;
* ours, 32 full rows: MXFP8, for every linear layer and expert; the rest has a space of its own;
* FSDP2: whole rows of dim 0, every parameter on its own;
* LCM of rows: Megatron-FSDP v2, shards are multiples of the LCM of all row sizes; and of 32 rows
  each, which is what its rule makes of MXFP8.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sshsdp.assembly.format_choice import takes_mxfp8
from sshsdp.estimate.loading import load_model
from sshsdp.estimate.peers import dim0_padded_numel, lcm_padded_numel
from sshsdp.estimate.planning import specs_by_unit
from sshsdp.layout.cuts import elements, rows
from sshsdp.layout.report import WORTH_A_WORD, report_plan
from sshsdp.layout.unit_plan import alignment_of, group_by_space, plan_unit, requests_of
from sshsdp.policies import RuntimePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from sshsdp.layout.cuts import Cuts
    from sshsdp.layout.unit_plan import ParameterSpec
    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["SHARDS", "block_specs", "markdown", "our_padding", "padding_rows"]

SHARDS = (8, 64, 128, 1024)
_RULES = ("anywhere", "rows", "32 rows")


def block_specs(model: nn.Module, rule: str) -> list[ParameterSpec]:
    """The parameters of the model's last block under one of our rules."""

    def is_cut_by_rows(slot: ParameterSlot, unit: str) -> bool:
        return rule != "anywhere" and takes_mxfp8(slot, unit)

    def cuts_of(slot: ParameterSlot, unit: str) -> Cuts:
        if not is_cut_by_rows(slot, unit):
            return elements()
        return rows(slot.shape, 1 if rule == "rows" else 32, may_transpose=True)

    def dtype_of(slot: ParameterSlot, unit: str) -> torch.dtype | None:
        # Quantized matrices, or those that a matrix optimizer takes, have a space of their own.
        if not is_cut_by_rows(slot, unit):
            return None
        return torch.float16 if rule == "rows" else torch.float8_e4m3fn

    specs = specs_by_unit(model, RuntimePolicy(), cuts_of=cuts_of, dtype_of=dtype_of)
    return [*specs.values()][-1]


def our_padding(specs: list[ParameterSpec], num_shards: int) -> float:
    """Padding of all spaces of a block, over its parameters."""
    layout = plan_unit("block", specs, num_shards=num_shards, num_update_slices=1)
    padding = sum(space.padding for space in layout.spaces)
    return padding / sum(math.prod(spec.shape) for spec in specs)


def _reason(specs: list[ParameterSpec], num_shards: int) -> str | None:
    """Why the padding of a block is 1% or more; None if it is less."""
    if our_padding(specs, num_shards) < WORTH_A_WORD:
        return None
    layout = plan_unit("block", specs, num_shards=num_shards, num_update_slices=1)
    reports = [
        report_plan(requests_of(members), space, alignment=alignment_of(members[0].runtime_dtype))
        for space, members in zip(layout.spaces, group_by_space(specs), strict=True)
    ]
    return str(max(reports, key=lambda report: report.padding))


def padding_rows(model: nn.Module) -> dict[str, list[float]]:
    """Padding by rule, for each of `SHARDS`."""
    found = {
        f"ours, {rule}": [our_padding(block_specs(model, rule), n) for n in SHARDS]
        for rule in _RULES
    }
    shapes = [spec.shape for spec in block_specs(model, "anywhere")]
    numel = sum(math.prod(shape) for shape in shapes)
    found["FSDP2"] = [
        sum(dim0_padded_numel(shape, n) for shape in shapes) / numel - 1 for n in SHARDS
    ]
    found["LCM of rows"] = [lcm_padded_numel(shapes, n) / numel - 1 for n in SHARDS]
    matrices = [spec.shape for spec in block_specs(model, "32 rows") if spec.cuts != elements()]
    in_matrices = sum(math.prod(shape) for shape in matrices)
    found["LCM of 32 rows"] = [
        (lcm_padded_numel(matrices, n, num_rows=32) - in_matrices) / numel for n in SHARDS
    ]
    return found


def markdown(sources: Sequence[str]) -> str:
    """The table for these configs, and why some cells are 1% or more."""
    columns = " | ".join(f"S = {n:,}" for n in SHARDS)
    lines = [f"| block of | cuts | {columns} |", "| --- | --- |" + " ---: |" * len(SHARDS)]
    notes = []
    for source in sources:
        model = load_model(source)
        name = Path(source).stem
        for rule, values in padding_rows(model).items():
            cells = " | ".join(f"{value:.2%}" for value in values)
            lines.append(f"| {name} | {rule} | {cells} |")
            name = ""
        for rule in _RULES:
            for num_shards in SHARDS:
                reason = _reason(block_specs(model, rule), num_shards)
                if reason is not None:
                    notes.append(f"* {Path(source).stem}, {rule}, S = {num_shards:,}: {reason}.")
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    sys.stdout.write(markdown(sys.argv[1:]) + "\n")
