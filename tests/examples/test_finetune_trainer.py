"""The examples with transformers' Trainer, at a small size, as a user launches them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running import ROOT, last_line
from tiny_model import write_model, write_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.interpreters import Interpreter

CONFIGURATION = str(ROOT / "examples" / "finetune_accelerate.yaml")
LAUNCHER = (
    *("-m", "accelerate.commands.launch", "--main_process_port", "0"),
    *("--config_file", CONFIGURATION),
)
SIZE = ("--batch-size", "2", "--sequence-length", "32", "--held-out", "8", "--steps", "12")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> Callable[..., dict[str, Any]]:
    """Run an example on a small model and a small text."""
    directory = tmp_path_factory.mktemp("trainer")
    write_text(directory / "text.txt")
    write_model(directory / "model", (directory / "text.txt").read_text(encoding="utf-8"))
    inputs = ("--model", str(directory / "model"), "--text", str(directory / "text.txt"))

    # The command line that the engine would find the file on is not that of a fork's parent.
    environment = {**interpreter.environment, "SSHSDP_CONFIG_FILE": CONFIGURATION}
    how = replace(interpreter, environment=environment)

    def run_one(script: str, name: str, *options: str) -> dict[str, Any]:
        output = ("--output", str(directory / name))
        return last_line(how, script, *inputs, *SIZE, *output, *options, launcher=LAUNCHER)

    return run_one


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_trainer_learns_the_text_and_exports(
    run: Callable[..., dict[str, Any]], optimizer: str
) -> None:
    options = ("--optimizer", optimizer, "--learning-rate", "1e-2", "--accumulate", "2")
    result = run("finetune_trainer.py", optimizer, *options)
    assert (result["world_size"], result["steps"]) == (2, 12)
    assert result["metric_after"] < 0.7 * result["metric_before"]
    assert result["export_reloads"] is True


def test_adapters_learn_and_are_exported(run: Callable[..., dict[str, Any]]) -> None:
    result = run("lora_trainer.py", "lora", "--learning-rate", "3e-2")
    assert result["trained_share"] < 0.5
    assert result["metric_after"] < 0.9 * result["metric_before"]
    assert result["export_reloads"] is True
    assert (Path(result["export"]) / "adapter_model.safetensors").is_file()
