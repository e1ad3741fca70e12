"""The fine-tuning example with Accelerate, at a small size, as a user launches it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running import ROOT, last_line
from tiny_model import write_model, write_text

if TYPE_CHECKING:
    from tests.support.interpreters import Interpreter

SIZE = (
    *("--steps", "6", "--batch-size", "2", "--accumulate", "2", "--sequence-length", "32"),
    *("--held-out", "8", "--learning-rate", "3e-3"),
)
CONFIGURATION = str(ROOT / "examples" / "finetune_accelerate.yaml")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--config_file", CONFIGURATION),
    *("--main_process_port", "0"),
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> dict[str, dict[str, Any]]:
    """The last lines of a run with the engine and of one with Accelerate's own DDP."""
    directory = tmp_path_factory.mktemp("finetune")
    write_text(directory / "text.txt")
    write_model(directory / "model", (directory / "text.txt").read_text(encoding="utf-8"))
    inputs = ("--model", str(directory / "model"), "--text", str(directory / "text.txt"))

    # The engine finds its file on the command line of the ranks' parent, which forks do not have.
    fresh = replace(interpreter, executable=sys.executable)

    def run(how: Interpreter, name: str, launcher: tuple[str, ...], *options: str) -> Any:
        arguments = (*inputs, *SIZE, "--output", str(directory / name), *options)
        return last_line(how, "finetune_accelerate.py", *arguments, launcher=launcher)

    return {
        "sshsdp": run(fresh, "sshsdp", ACCELERATE),
        "ddp": run(interpreter, "ddp", TORCHRUN, "--plain"),
    }


def test_the_loop_learns_the_text_and_goes_on_from_the_checkpoint(
    results: dict[str, dict[str, Any]],
) -> None:
    result = results["sshsdp"]
    assert (result["world_size"], result["resumed_at_step"], result["steps"]) == (2, 6, 12)
    assert (Path(result["checkpoint"]) / "pytorch_model_fsdp_0").is_dir()
    assert result["metric_after"] < 0.5 * result["metric_before"]
    assert result["export_reloads"] is True


def test_the_numbers_are_those_of_ddp(results: dict[str, dict[str, Any]]) -> None:
    for number in ("first_loss", "last_loss", "metric_before", "metric_after"):
        ours, theirs = results["sshsdp"][number], results["ddp"][number]
        assert ours == pytest.approx(theirs, rel=1e-5), number
