"""Owners of whole matrices hold about equally much, in models of real shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sshsdp.assembly.discovery import ROOT, collect_slots, find_unit_modules, unit_of_slot
from sshsdp.assembly.splits import resolve_splits
from sshsdp.estimate.loading import load_model
from sshsdp.estimate.optimizers import optimizer_cost
from sshsdp.layout.owners import assign_owners_on_mesh

CONFIGS = Path(__file__).parents[2] / "docs" / "configs"


@pytest.mark.parametrize("mesh", [(1, 8), (16, 8)], ids=str)
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3"])
def test_muons_state_on_every_rank_is_within_a_tenth_of_its_share(
    name: str, mesh: tuple[int, int]
) -> None:
    """Momentum of owned matrices, and AdamW's two moments of the rest in equal flat parts."""
    model = load_model(str(CONFIGS / f"{name}.json"))
    slots = collect_slots(model)
    modules = find_unit_modules(model, None)
    muon = optimizer_cost("muon")
    matrices, flat = [], 0.0
    for slot, units in resolve_splits({}, model, slots).items():
        is_hidden = unit_of_slot(slot, modules) != ROOT
        if muon.needs_whole(slot.shape, is_hidden):
            matrices += [unit.numel for unit in units]
        else:
            flat += muon.state_nbytes(slot.shape, 4, is_hidden)
    rows, columns = mesh
    loads = [[flat / (rows * columns)] * columns for _ in range(rows)]
    for numel, (row, column) in zip(
        matrices, assign_owners_on_mesh(matrices, [[0] * columns] * rows), strict=True
    ):
        loads[row][column] += 4 * numel
    share = (flat + 4 * sum(matrices)) / (rows * columns)
    assert max(max(row) for row in loads) <= 1.1 * share
