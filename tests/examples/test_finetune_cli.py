"""The fine-tuning example with LightningCLI and its YAML file, at a small size."""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

import pytest
from running import ROOT, run_example
from tiny_model import write_model, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.interpreters import Interpreter

CONFIG = ("--config", str(ROOT / "examples" / "finetune_cli.yaml"))


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> tuple[Path, tuple[str, ...]]:
    """Where a run of ``fit`` wrote, and the options that made it small."""
    directory = tmp_path_factory.mktemp("finetune")
    write_text(directory / "text.txt")
    write_model(directory / "model", (directory / "text.txt").read_text(encoding="utf-8"))
    size = (
        *("--model.model", str(directory / "model"), "--data.text", str(directory / "text.txt")),
        *("--data.sequence_length", "32", "--data.train", "96", "--data.held_out", "8"),
        *("--model.learning_rate", "3e-3", "--trainer.enable_model_summary", "false"),
    )
    run_example(interpreter, "finetune_cli.py", "fit", *CONFIG, *size, cwd=directory)
    return directory / "outputs" / "finetune_cli", size


def _metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "lightning_logs" / "version_0" / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_file_trains_the_model_and_logs_what_it_asks_for(
    run: tuple[Path, tuple[str, ...]],
) -> None:
    rows = _metrics(run[0])
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert len(losses) == 24
    assert losses[-1] < losses[0] - 1
    assert any(row["throughput/tokens_per_second"] for row in rows)
    assert any(row["lr-AdamW/pg1"] for row in rows)


def test_another_command_validates_the_checkpoint(
    run: tuple[Path, tuple[str, ...]], interpreter: Interpreter
) -> None:
    folder, size = run
    last = folder / "checkpoints" / "last.ckpt"
    assert last.is_dir()
    printed = run_example(
        interpreter,
        "finetune_cli.py",
        *("validate", *CONFIG, *size, "--ckpt_path", str(last)),
        cwd=folder.parents[1],
    )
    found = re.search(r"held_out_loss\s+\S\s+([\d.]+)", printed)
    assert found is not None, printed
    expected = next(row["held_out_loss"] for row in _metrics(folder) if row["held_out_loss"])
    assert float(found.group(1)) == pytest.approx(float(expected), rel=1e-5)
