"""The predicted bytes, layout and memory against real engines over gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.estimate.wire_cases import run_cases

if TYPE_CHECKING:
    from tests.support.workers import WorkerPool


@pytest.fixture(scope="module")
def results(worker_pool: WorkerPool) -> list[list[dict[str, Any]]]:
    """Per case, what each rank reported."""
    by_case = []
    for world_size in (4, 2):
        by_rank = worker_pool.run(world_size, run_cases, timeout=240)
        by_case += [list(ranks) for ranks in zip(*by_rank, strict=True)]
    return by_case


def test_all_meshes_and_policies_ran(results: list[list[dict[str, Any]]]) -> None:
    meshes = [tuple(ranks[0]["case"]["mesh"]) for ranks in results]
    assert {mesh: meshes.count(mesh) for mesh in meshes} == {
        (2, 2): 4,
        (1, 4): 4,
        (4, 1): 4,
        (1, 2): 4,
    }


@pytest.mark.parametrize("step", ["one", "clipped", "accumulated"])
def test_counted_bytes_equal_the_prediction_by_axis_and_collective(
    results: list[list[dict[str, Any]]], step: str
) -> None:
    for ranks in results:
        for report in ranks:
            assert report["counted"][step] == report["expected"][step], report["case"]


def test_the_plan_made_without_processes_is_the_engine_s_layout(
    results: list[list[dict[str, Any]]],
) -> None:
    assert all(report["same_layout"] for ranks in results for report in ranks)


@pytest.mark.parametrize("kind", ["runtime_shards", "masters"])
def test_predicted_shards_equal_the_engine_s(
    results: list[list[dict[str, Any]]], kind: str
) -> None:
    for ranks in results:
        for report in ranks:
            measured, predicted = report[kind]
            assert measured == predicted, report["case"]


@pytest.mark.parametrize("kind", ["peak_gathered", "peak_gradients"])
def test_predicted_peaks_equal_the_measured_ones(
    results: list[list[dict[str, Any]]], kind: str
) -> None:
    for ranks in results:
        report = ranks[0]
        if report["case"]["mesh"][1] > 1:
            measured, predicted = report[kind]
            assert measured == predicted, report["case"]


def test_predicted_optimizer_state_is_the_mean_over_ranks(
    results: list[list[dict[str, Any]]],
) -> None:
    for ranks in results:
        measured = sum(report["optimizer_state"][0] for report in ranks) / len(ranks)
        predicted = ranks[0]["optimizer_state"][1]
        # Padding at the end of a space has no state, padding between parameters has.
        assert measured <= predicted <= 1.1 * measured + 256, ranks[0]["case"]


def test_hierarchical_sends_less_over_replicate_than_an_all_reduce(
    results: list[list[dict[str, Any]]],
) -> None:
    """bf16 comes back instead of fp32: 6 bytes per element instead of 8."""
    by_key = {
        (tuple(r[0]["case"]["mesh"]), r[0]["case"]["sharding"], r[0]["case"]["frozen"]): r[0]
        for r in results
        if r[0]["case"]["dtype"] == "bfloat16"
    }
    for mesh in ((2, 2), (4, 1)):

        def over_replicate(sharding: str, mesh: tuple[int, int] = mesh) -> int:
            counted = by_key[mesh, sharding, False]["counted"]["one"]
            return sum(n for kind, n in counted.items() if kind.startswith("replicate/"))

        assert over_replicate("hierarchical") <= 0.77 * over_replicate("replicated")
