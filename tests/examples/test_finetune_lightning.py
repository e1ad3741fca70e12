"""The fine-tuning example, at a small size, as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from running import last_line
from tiny_model import write_model, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.interpreters import Interpreter

SIZE = (
    *("--steps", "6", "--batch-size", "2", "--accumulate", "2", "--sequence-length", "32"),
    *("--held-out", "8", "--learning-rate", "3e-3"),
)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> Callable[..., dict[str, Any]]:
    """Runs the example on two processes and returns its last line; each command line only once."""
    directory = tmp_path_factory.mktemp("finetune")
    write_text(directory / "text.txt")
    write_model(directory / "model", (directory / "text.txt").read_text(encoding="utf-8"))
    done: dict[tuple[str, ...], dict[str, Any]] = {}

    def run_once(*options: str) -> dict[str, Any]:
        if options not in done:
            done[options] = last_line(
                interpreter,
                "finetune_lightning.py",
                *("--model", str(directory / "model"), "--text", str(directory / "text.txt")),
                *("--output", str(directory / f"output-{len(done)}"), *SIZE, *options),
            )
        return done[options]

    return run_once


def test_two_processes_learn_the_text_and_go_on_from_the_checkpoint(
    run: Callable[..., dict[str, Any]],
) -> None:
    result = run("--strategy", "sshsdp")
    assert (result["strategy"], result["world_size"]) == ("sshsdp", 2)
    assert (result["resumed_at_step"], result["steps"]) == (6, 12)
    assert Path(result["checkpoint"]).is_dir()
    assert result["last_loss"] < result["first_loss"] - 0.5
    assert result["metric_after"] < 0.5 * result["metric_before"]


def test_the_numbers_are_those_of_ddp(run: Callable[..., dict[str, Any]]) -> None:
    ours, theirs = run("--strategy", "sshsdp"), run("--strategy", "ddp")
    for number in ("first_loss", "last_loss", "metric_before", "metric_after"):
        assert ours[number] == pytest.approx(theirs[number], rel=1e-5), number


def test_plain_transformers_generates_from_the_export(run: Callable[..., dict[str, Any]]) -> None:
    result = run("--strategy", "sshsdp")
    assert result["export_reloads"] is True
    model = AutoModelForCausalLM.from_pretrained(result["export"])
    tokenizer = AutoTokenizer.from_pretrained(result["export"])
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    prompt = torch.tensor([tokenizer("And the ranks")["input_ids"]])
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    assert written.shape[1] > prompt.shape[1]


def test_bf16_and_recomputed_activations_learn_too(run: Callable[..., dict[str, Any]]) -> None:
    result = run("--precision", "bf16-mixed", "--gradient-checkpointing")
    assert result["export_reloads"] is True
    assert result["metric_after"] < 0.5 * result["metric_before"]
