"""Optimizers on whole matrices: their states move between meshes and to plain torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_matrix_optimizers import muon_and_adamw
from tests.support.compare import worst_weight
from tests.support.matrices import (
    Case,
    attach,
    build,
    iterating_in_fp32,
    loss_of,
    step_of,
    train_plain,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASE = Case(subject="decoder", make=muon_and_adamw, mesh=(2, 2))


def save_after(case: Case, steps: int, path: str) -> None:
    model, engine, optimizers = attach(case)
    for step in range(steps):
        step_of(case, model, engine, optimizers, step)
    engine.save(path, optimizers)


def continue_with_all_rows(case: Case, start: int, stop: int, path: str) -> Any:
    """Load, and train every rank on what four ranks would see, whatever the mesh."""
    model, engine, optimizers = attach(case)
    # A state of its own must not show.
    step_of(case, model, engine, optimizers, 99)
    engine.load(path, optimizers)
    for step in range(start, stop):
        for virtual in range(4):
            with engine.no_sync(virtual < 3):
                (loss_of(case, model, step, 0, virtual) / 4).backward()
        with iterating_in_fp32():
            for optimizer in optimizers:
                optimizer.step()
        engine.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize("mesh", [(1, 4), (4, 1), (1, 1), (2, 2), (1, 3)], ids=str)
def test_muon_and_adamw_continue_on_another_mesh(
    workers: Callable[[int], Any], tmp_path: Path, mesh: Any
) -> None:
    path = str(tmp_path / "saved")
    workers(4).run(save_after, CASE, 5, path)
    case = replace(CASE, mesh=mesh)
    actual = workers(case.size).run(continue_with_all_rows, case, 5, 10, path)[0]
    expected, _ = train_plain(replace(CASE, steps=10))
    error, name = worst_weight(actual, expected)
    assert error <= 1e-5, f"{name} differs by {error:.2e}"


def exchange_whole_states(case: Case, plain_states: list[Any]) -> Any:
    """Load plain states, and give back what is there, before and after a step."""
    model, engine, optimizers = attach(case)
    for optimizer, state in zip(optimizers, plain_states, strict=True):
        engine.load_full_optimizer_state_dict(optimizer, state if dist.get_rank() == 0 else {})
    loaded = [engine.full_optimizer_state_dict(optimizer) for optimizer in optimizers]
    step_of(case, model, engine, optimizers, 0)
    return loaded


@pytest.mark.parametrize("mesh", [(1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("sharding", ["hierarchical", "replicated"])
def test_whole_states_are_those_of_plain_torch(
    workers: Callable[[int], Any], mesh: Any, sharding: str
) -> None:
    case = replace(CASE, mesh=mesh, sharding=sharding)
    model = build(case)
    optimizers = muon_and_adamw(model)
    for step in range(3):
        loss_of(case, model, step, 0, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    loaded = workers(case.size).run(exchange_whole_states, case, states)[0]
    for optimizer, state, expected in zip(optimizers, loaded, states, strict=True):
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        optimizer.load_state_dict(state)
