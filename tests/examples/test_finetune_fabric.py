"""The fine-tuning example with Fabric, at a small size, as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running import last_line
from tiny_model import write_model, write_text

if TYPE_CHECKING:
    from tests.support.interpreters import Interpreter

SIZE = (
    *("--steps", "6", "--batch-size", "2", "--accumulate", "2", "--sequence-length", "32"),
    *("--held-out", "8", "--learning-rate", "3e-3"),
)


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> dict[str, dict[str, Any]]:
    """The last lines of a run with this strategy and of one with DDP."""
    directory = tmp_path_factory.mktemp("finetune")
    write_text(directory / "text.txt")
    write_model(directory / "model", (directory / "text.txt").read_text(encoding="utf-8"))
    inputs = ("--model", str(directory / "model"), "--text", str(directory / "text.txt"))
    return {
        strategy: last_line(
            interpreter,
            "finetune_fabric.py",
            *(*inputs, *SIZE, "--strategy", strategy, "--output", str(directory / strategy)),
        )
        for strategy in ("sshsdp", "ddp")
    }


def test_the_loop_learns_the_text_and_goes_on_from_the_checkpoint(
    results: dict[str, dict[str, Any]],
) -> None:
    result = results["sshsdp"]
    assert (result["world_size"], result["resumed_at_step"], result["steps"]) == (2, 6, 12)
    assert Path(result["checkpoint"]).is_dir()
    assert result["metric_after"] < 0.5 * result["metric_before"]
    assert result["export_reloads"] is True


def test_the_numbers_are_those_of_ddp(results: dict[str, dict[str, Any]]) -> None:
    for number in ("first_loss", "last_loss", "metric_before", "metric_after"):
        ours, theirs = results["sshsdp"][number], results["ddp"][number]
        assert ours == pytest.approx(theirs, rel=1e-5), number
