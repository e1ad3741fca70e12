"""`sshsdp plan`: its numbers, its output forms and its refusals."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sshsdp.cli import app

CONFIGS = Path(__file__).with_name("configs")
LLAMA = str(CONFIGS / "tiny-llama.json")
MOE = str(CONFIGS / "tiny-moe.json")


def build_two_layers() -> nn.Module:
    """A model for ``--model module:function``."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model.head = nn.Linear(8, 3)
    return model


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def plan(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_memory_of_a_rank_is_what_the_shapes_say() -> None:
    made = plan("--model", LLAMA, "--mesh", "2x4")
    numel = made["num_parameters"]
    assert numel == 2 * 96 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64 + 2 * 64)
    ours = made["schemes"]["SS-HSDP"]["memory_bytes"]
    # Nothing here needs padding: all sizes divide by 8 ranks x 8 elements.
    assert ours["runtime_shards"] == 2 * numel // 4
    assert ours["masters"] == 4 * numel // 8
    assert ours["optimizer_state"] == 8 * numel // 8
    assert ours["sharded_gradients"] == 4 * numel // 8
    hsdp = made["schemes"]["HSDP"]["memory_bytes"]
    assert hsdp["masters"] == 4 * numel // 4
    assert hsdp["optimizer_state"] == 8 * numel // 4
    assert made["schemes"]["FSDP2"]["mesh"] == [1, 8]


def test_units_and_packs_are_the_user_s_choice() -> None:
    patterns = ("model.layers.*.mlp", "model.layers.*.self_attn")
    options = [word for pattern in patterns for word in ("--unit", pattern)]
    made = plan("--model", LLAMA, "--mesh", "2x4", "--packs", *options)
    names = [name for row in made["units"] for name in row["names"]]
    assert len(names) == 1 + 2 * 3
    whole = plan("--model", LLAMA, "--mesh", "2x4")
    numels = [
        sum(s["numel"] * len(r["names"]) for r in m["units"] for s in r["spaces"])
        for m in (made, whole)
    ]
    assert numels[0] == numels[1]


def test_a_one_dimensional_mesh_has_no_classic_hsdp_beside_it() -> None:
    made = plan("--model", LLAMA, "--mesh", "4")
    assert made["mesh"] == [1, 4]
    assert list(made["schemes"]) == ["SS-HSDP", "FSDP2"]


def test_hierarchical_sends_no_more_over_replicate_than_classic_hsdp() -> None:
    for runtime_format, most in (("bf16", 0.76), ("fp32", 1.0), ("mxfp8", 0.80)):
        made = plan("--model", LLAMA, "--mesh", "2x2", "--format", runtime_format)
        sent = {
            name: scheme["wire_bytes_by_axis"]["replicate"]
            for name, scheme in made["schemes"].items()
        }
        assert sent["SS-HSDP"] <= most * sent["HSDP"]


def test_replicated_sharding_repeats_optimizer_state_over_replicas() -> None:
    made = plan("--model", LLAMA, "--mesh", "2x2", "--sharding", "replicated")
    ours, hsdp = (made["schemes"][name]["memory_bytes"] for name in ("SS-HSDP", "HSDP"))
    assert ours["optimizer_state"] == hsdp["optimizer_state"]


def test_mxfp8_halves_the_gathers_of_the_blocks_and_leaves_the_rest_dense() -> None:
    dense, quantized = (
        plan("--model", LLAMA, "--mesh", "4", "--format", f) for f in ("bf16", "mxfp8")
    )
    spaces = [space for unit in quantized["units"] for space in unit["spaces"]]
    assert [space["dtype"] for space in spaces] == ["bfloat16", "float8_e4m3fn", "bfloat16"]
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64
    assert spaces[1]["numel"] - spaces[1]["padding"] == matrices
    root = 2 * (2 * 96 * 64 + 64)
    norms = 2 * 2 * 64

    def gathered(made: dict[str, Any]) -> int:
        return made["schemes"]["SS-HSDP"]["wire_bytes"]["shard/all_gather"]

    # Three blocks forward and, but for the last one, backward; MXFP8 bytes differ there.
    assert gathered(dense) == (root + 5 * (2 * matrices + norms)) * 3 // 4
    padded = spaces[1]["numel"]
    assert gathered(quantized) == (root + 6 * padded * 33 // 32 + 5 * norms) * 3 // 4
    stored = quantized["schemes"]["SS-HSDP"]["memory_bytes"]["runtime_shards"]
    assert stored == (root + 3 * (2 * padded * 33 // 32 + norms)) // 4


def test_experts_are_planned_as_stacks_and_count_by_their_active_share() -> None:
    made = plan("--model", MOE, "--mesh", "4", "--format", "mxfp8", "--batch", "2", "--seq", "16")
    blocks = next(unit for unit in made["units"] if len(unit["names"]) == 2)
    assert blocks["spaces"][0]["numel"] >= 8 * 3 * 32 * 64
    assert made["schemes"]["SS-HSDP"]["memory_bytes"]["activations"] > 0


def test_a_block_too_small_for_the_mesh_says_why_it_is_padded() -> None:
    result = run("--model", LLAMA, "--mesh", "64", "--format", "mxfp8")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "64 shards of 0.33 pieces each, which cannot be cut finer (2,048 elements)" in text
    assert "no legal plan has less" in text


def test_low_bit_state_is_a_byte_per_moment_and_a_scale_per_block() -> None:
    full, low = (
        plan("--model", LLAMA, "--mesh", "2", "--optimizer", o) for o in ("adamw", "adamw8bit")
    )
    state = [made["schemes"]["SS-HSDP"]["memory_bytes"]["optimizer_state"] for made in (full, low)]
    numel = full["num_parameters"]
    assert state[0] == 8 * numel // 2
    # Keys, values and norms are too small for torchao to quantize.
    small = 3 * (2 * 32 * 64 + 2 * 64) + 64
    expected = 8 * small + (2 + 2 * 4 / 256) * (numel - small)
    assert state[1] == pytest.approx(expected / 2, rel=0.01)


def test_updates_on_the_host_leave_the_accelerator() -> None:
    here, there = (
        plan("--model", LLAMA, "--mesh", "2", *extra) for extra in ((), ("--update-device", "cpu"))
    )
    memory = there["schemes"]["SS-HSDP"]["memory_bytes"]
    moved = memory["masters"] + memory["optimizer_state"] + memory["sharded_gradients"]
    assert memory["on_host"] == moved
    assert here["schemes"]["SS-HSDP"]["memory_bytes"]["total"] - memory["total"] == moved


def test_more_micro_batches_take_more_gathers_but_one_reduction() -> None:
    batch = ("--model", LLAMA, "--mesh", "2x2", "--batch", "1", "--seq", "32")
    one, four = (plan(*batch, "--micro-batches", n) for n in ("1", "4"))
    wire = [made["schemes"]["SS-HSDP"]["wire_bytes"] for made in (one, four)]
    assert wire[1]["shard/all_gather"] == 4 * wire[0]["shard/all_gather"]
    assert wire[1]["shard/reduce_scatter"] == wire[0]["shard/reduce_scatter"]
    assert wire[1]["replicate/reduce_scatter"] == wire[0]["replicate/reduce_scatter"]
    kept = [
        made["schemes"]["SS-HSDP"]["memory_bytes"]["unsharded_gradients"] for made in (one, four)
    ]
    assert kept[1] == 4 * one["num_parameters"] > kept[0]


def test_the_step_is_the_sum_of_its_parts_and_faster_on_faster_hardware() -> None:
    steps = []
    for hardware in ("H100", "B200"):
        made = plan(
            "--model",
            LLAMA,
            "--mesh",
            "2x8",
            "--batch",
            "4",
            "--seq",
            "512",
            "--hardware",
            hardware,
        )
        step = made["schemes"]["SS-HSDP"]["step"]
        parts = step["compute"] + step["exposed"] + step["copies"] + step["optimizer"]
        assert step["total"] == pytest.approx(parts)
        assert 0 < step["mfu"] < 0.65
        assert step["copies"] == 0 < made["schemes"]["FSDP2"]["step"]["copies"]
        assert step["total"] < made["schemes"]["HSDP"]["step"]["total"]
        steps.append(step["total"])
    assert steps[1] < steps[0]


def test_recomputing_activations_saves_memory_and_costs_time() -> None:
    batch = ("--model", LLAMA, "--mesh", "2", "--batch", "2", "--seq", "64")
    kept, recomputed = (plan(*batch, *extra) for extra in ((), ("--checkpoint-activations",)))
    ours = [made["schemes"]["SS-HSDP"] for made in (kept, recomputed)]
    assert ours[1]["memory_bytes"]["activations"] < ours[0]["memory_bytes"]["activations"]
    assert ours[1]["step"]["compute"] == pytest.approx(ours[0]["step"]["compute"] * 4 / 3)


def test_a_function_can_give_the_model() -> None:
    source = "tests.estimate.test_plan_command:build_two_layers"
    made = plan("--model", source, "--mesh", "2", "--batch", "1", "--seq", "4")
    assert made["num_parameters"] == 2 * 72 + 27
    assert made["notes"] == ["Activations and attention: the model has no Hugging Face config."]
    assert [unit["names"] for unit in made["units"]] == [["<root>"], ["layers.0", "layers.1"]]


def test_tables_show_every_kind_of_memory_and_traffic() -> None:
    result = run("--model", LLAMA, "--mesh", "2x2", "--batch", "1", "--seq", "32")
    assert result.exit_code == 0
    for text in (
        "masters",
        "optimizer state",
        "replicate: all-gather",
        "MFU",
        "classic HSDP",
        "FSDP2",
    ):
        assert text.replace("classic ", "") in result.output


@pytest.mark.parametrize("mesh", ["2x4", "64", "4x64"])
def test_a_picture_is_drawn(tmp_path: Path, mesh: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    result = run("--model", LLAMA, "--mesh", mesh, "--format", "mxfp8", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "sshsdp", "plan", "--model", LLAMA, "--mesh", "2x2", "--json"]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert json.loads(done.stdout)["mesh"] == [2, 2]


REFUSALS = {
    "a mesh that is none": (("--model", LLAMA, "--mesh", "2by2"), "--mesh must be RxS"),
    "an empty mesh": (("--model", LLAMA, "--mesh", "0x4"), "--mesh must be RxS"),
    "an unknown optimizer": (
        ("--model", LLAMA, "--mesh", "2", "--optimizer", "adem"),
        "unknown optimizer 'adem'; known: adamw",
    ),
    "an unknown format": (
        ("--model", LLAMA, "--mesh", "2", "--format", "fp4"),
        "unknown format 'fp4'; known: bf16",
    ),
    "unknown hardware": (
        ("--model", LLAMA, "--mesh", "2", "--hardware", "Z80"),
        "--hardware must be one of H100, H200, B200 or a JSON file, got 'Z80'",
    ),
    "a model that is nowhere": (
        ("--model", "no/such/config.json", "--mesh", "2"),
        "neither a config file, nor a directory with a config.json, nor module:function",
    ),
    "a module that is nowhere": (
        ("--model", "no_such_module:build", "--mesh", "2"),
        "cannot import 'no_such_module'",
    ),
    "a function that is nowhere": (
        ("--model", "tests.estimate.test_plan_command:nothing", "--mesh", "2"),
        "has no function 'nothing'",
    ),
    "a function that gives no model": (
        ("--model", "builtins:dict", "--mesh", "2"),
        "it returned dict, not a torch.nn.Module",
    ),
    "half a batch": (("--model", LLAMA, "--mesh", "2", "--batch", "1"), "go together"),
    "an empty batch": (
        ("--model", LLAMA, "--mesh", "2", "--batch", "0", "--seq", "8"),
        "size must be 1 or more, got 0",
    ),
    "an unknown sharding": (
        ("--model", LLAMA, "--mesh", "2", "--sharding", "split"),
        "must be 'hierarchical' or 'replicated'",
    ),
    "an unknown kind of picture": (
        ("--model", LLAMA, "--mesh", "2", "--plot", "plan.xyz"),
        "--plot plan.xyz",
    ),
    "a unit that is not there": (
        ("--model", LLAMA, "--mesh", "2", "--unit", "nope.*"),
        "the pattern 'nope.*' matches no name",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_with_its_reason(case: str) -> None:
    arguments, message = REFUSALS[case]
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "has a model_type"), ('{"model_type": "no-such"}', "'no-such'")],
)
def test_a_broken_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = run("--model", str(tmp_path), "--mesh", "2")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_without_transformers_a_config_is_refused_and_a_function_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib

    real = importlib.import_module

    def fail(name: str, package: str | None = None) -> Any:
        if name == "transformers":
            raise ImportError("no transformers here")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", fail)
    result = run("--model", LLAMA, "--mesh", "2")
    assert result.exit_code == 2
    assert "needs transformers: pip install transformers" in " ".join(result.output.split())
    source = "tests.estimate.test_plan_command:build_two_layers"
    assert run("--model", source, "--mesh", "2").exit_code == 0


def test_without_matplotlib_a_picture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("no matplotlib here")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", fail)
    result = run("--model", LLAMA, "--mesh", "2", "--plot", "plan.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib: pip install" in " ".join(result.output.split())


def test_without_typer_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; import sshsdp.cli"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=False, env=environment
    )
    assert done.returncode == 1
    assert b"the sshsdp command needs typer: pip install 'sshsdp[plan]'" in done.stderr


def test_the_model_is_built_on_meta() -> None:
    from sshsdp.estimate.loading import load_model

    assert all(p.device == torch.device("meta") for p in load_model(LLAMA).parameters())
