"""From the questionnaire through an Accelerate YAML and `accelerate launch` into the program."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from accelerate.commands.config.update import update_config
from accelerate.commands.env import env_command

from accelerate_sshsdp import SSHSDPPlugin, commands, configuration
from accelerate_sshsdp.configuration import read_file
from accelerate_sshsdp.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Machines, use_cpu, processes, precision, defaults?
PLACE = ["", "yes", "2"]
# Of every setting, in order: an answer, and what the plugin then holds.
ANSWERS: dict[str, tuple[str, Any]] = {
    "units": ("LlamaDecoderLayer", ["LlamaDecoderLayer"]),
    "replicate_size": ("2", 2),
    "shard_size": ("1", 1),
    "update_sharding": ("replicated", "replicated"),
    "reshard_after_forward": ("no", False),
    "prefetch": ("2", 2),
    "packs": ("yes", True),
    "runtime_dtype": ("float32", torch.float32),
    "runtime_format": ("auto", None),
    "update_dtype": ("float32", torch.float32),
    "reduce_dtype": ("float32", torch.float32),
    "formats": ("*norm*=float32", {"*norm*": torch.float32}),
    "offload": ("yes", True),
    "activation_checkpointing": ("yes", True),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    read_file.cache_clear()
    yield
    read_file.cache_clear()


def ask(monkeypatch: pytest.MonkeyPatch, path: Path, answers: list[str]) -> dict[str, Any]:
    """Answer the questions; returns the YAML."""
    remaining = iter(answers)

    def answer(question: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    commands.main(["config", "--config_file", str(path)])
    assert not [*remaining]
    return yaml.safe_load(path.read_text())


def test_every_setting_can_be_answered_and_is_read_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [*ANSWERS] == [*SETTINGS]
    path = tmp_path / "new" / "x.yaml"
    given = [*PLACE, "no", "no", *(text for text, _ in ANSWERS.values())]
    written = ask(monkeypatch, path, given)
    assert written["distributed_type"] == "FSDP"
    assert written["use_cpu"] is True
    assert written["num_processes"] == 2
    # Only what stock Accelerate has no key for is under our own.
    assert written["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert written["fsdp_config"]["sshsdp_prefetch"] == 2
    assert written["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2

    # Accelerate's own commands keep it.
    update_config(argparse.Namespace(config_file=str(path)))
    assert yaml.safe_load(path.read_text()) == written
    capsys.readouterr()
    info = env_command(argparse.Namespace(config_file=str(path)))
    assert info["`Accelerate` configs"]["fsdp_config"] == written["fsdp_config"]
    assert "'sshsdp_prefetch': 2" in capsys.readouterr().out

    monkeypatch.setenv("SSHSDP_CONFIG_FILE", str(path))
    plugin = SSHSDPPlugin()
    assert vars(plugin) == {name: held for name, (_, held) in ANSWERS.items()}
    # Nearer to the program counts more.
    monkeypatch.setenv("SSHSDP_PREFETCH", "3")
    assert SSHSDPPlugin().prefetch == 3
    assert SSHSDPPlugin(prefetch=4).prefetch == 4


def test_defaults_are_written_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    ask(monkeypatch, path, ["", "", "", "", ""])
    monkeypatch.setenv("SSHSDP_CONFIG_FILE", str(path))
    assert SSHSDPPlugin() == SSHSDPPlugin(**{name: s.default for name, s in SETTINGS.items()})
    written = ask(monkeypatch, path, [*PLACE, "mxfp8", "yes"])
    assert written["mixed_precision"] == "bf16"
    read_file.cache_clear()
    assert SSHSDPPlugin().runtime_format == "mxfp8"


def test_the_examples_file_is_what_the_questionnaire_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = ask(monkeypatch, tmp_path / "x.yaml", [*PLACE, "", ""])
    example = pathlib.Path(__file__).parents[2] / "examples" / "finetune_accelerate.yaml"
    assert yaml.safe_load(example.read_text()) == written


def test_machines_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = ["2", "2", "1", "", "10.0.0.1", "70000", "", "yes", "1", "4", "", ""]
    written = ask(monkeypatch, tmp_path / "x.yaml", answers)
    names = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
    assert [written[name] for name in names] == [2, 1, "10.0.0.1", 29500]
    assert written["num_processes"] == 4


def test_wrong_answers_are_refused_with_the_name_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "replicate_size": "0",
        "shard_size": "many",
        "update_sharding": "sharded",
        "reshard_after_forward": "FULL_SHARD",
        "prefetch": "-1",
        "packs": "all",
        "runtime_dtype": "mxfp8",
        "runtime_format": "fp4",
        "update_dtype": "int8",
        "reduce_dtype": "bf16",
        "formats": "*norm*",
        "offload": "disk",
        "activation_checkpointing": "2",
    }
    answers = ["some", "", "maybe", "yes", "none", "2", "fp8", "fp16", "no"]
    for name, (right, _) in (ANSWERS | {"runtime_dtype": ("auto", None)}).items():
        answers += [wrong[name], right] if name in wrong else [right]
        if name == "shard_size":
            # Each is right, and together they are not.
            answers[-1:] = ["2", "2", "1"]
        if name == "runtime_format":
            answers[-1:] = ["mxfp8", "float32", "auto"]
    with pytest.raises(SystemExit, match="nothing was written"):
        ask(monkeypatch, tmp_path / "x.yaml", answers[:5])
    assert not (tmp_path / "x.yaml").exists()
    capsys.readouterr()
    ask(monkeypatch, tmp_path / "x.yaml", answers)
    said = capsys.readouterr().out
    for name, text in {"num_machines": "some", "use_cpu": "maybe", "num_processes": "none"}.items():
        assert f"{name} must be " in said and f"got {text!r}" in said
    assert "mixed_precision must be one of no, fp16, bf16, mxfp8, got 'fp8'" in said
    for name, text in wrong.items():
        assert any(
            line.startswith(f"{name} must be ") and line.endswith(f"got {text!r}")
            for line in said.splitlines()
        ), name
    assert "make 2 x 2 ranks, but there are 2" in said
    assert "runtime_format=mxfp8 computes in float32 or bfloat16" in said


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"sshsdp_prefech": 1}, r"x.yaml: unknown key 'sshsdp_prefech' in fsdp_config; there are "),
        ({"sshsdp_prefetch": -1}, r"x.yaml: prefetch must be a whole number of 0 or more, got -1"),
        (
            {"sshsdp_units": "auto", "fsdp_reshard_after_forward": "FULL_SHARD"},
            r"x.yaml: reshard_after_forward must be true or false, got 'FULL_SHARD'",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_names_of_file_and_field(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: dict[str, Any], words: str
) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"fsdp_config": section}))
    monkeypatch.setenv("SSHSDP_CONFIG_FILE", str(tmp_path / "x.yaml"))
    with pytest.raises(ValueError, match=words):
        SSHSDPPlugin()
    monkeypatch.setenv("SSHSDP_CONFIG_FILE", str(tmp_path / "y.yaml"))
    with pytest.raises(FileNotFoundError, match="there is no configuration file"):
        SSHSDPPlugin()
    (tmp_path / "y.yaml").write_text("distributed_type: MULTI_GPU")
    with pytest.raises(ValueError, match=r"SSHSDP_CONFIG_FILE: .*y\.yaml has no keys for SS-HSDP"):
        SSHSDPPlugin()


@pytest.mark.parametrize(
    "command",
    [
        "python -u /bin/accelerate launch",
        "/bin/accelerate-launch",
        "accelerate launch",
        "python -m accelerate.commands.launch",
        "python3.11 -m accelerate.commands.accelerate_cli launch",
    ],
)
def test_the_file_and_options_are_found_on_the_launchers_command_line(
    command: str, tmp_path: Path
) -> None:
    arguments = "--config_file x.yaml --fsdp_reshard_after_forward=false run.py --config_file y"
    found = configuration._launch_arguments([*command.split(), *arguments.split()])
    launch = configuration._parse_launch(found, tmp_path)
    assert launch.path == tmp_path / "x.yaml"
    assert launch.options == {"reshard_after_forward": "false"}
    assert configuration._launch_arguments(["python", "launch.py", "accelerate"]) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_stock_accelerate_launch_carries_the_file_into_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    """Its processes train, save and resume; options of the command line count more."""
    num_processes = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    place = ["", "yes" if device == "cpu" else "no", str(num_processes)]
    answers = {name: text for name, (text, _) in ANSWERS.items()}
    answers |= {"replicate_size": "auto", "shard_size": str(num_processes), "runtime_dtype": "auto"}
    path = tmp_path / "x.yaml"
    ask(monkeypatch, path, [*place, "bf16", "no", *answers.values()])
    launcher = "-m accelerate.commands.launch --main_process_port 0 --config_file"
    options = "--fsdp_reshard_after_forward true -m tests.accelerate.launched"
    subprocess.run(
        [sys.executable, *launcher.split(), path, *options.split(), tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=240,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["processes"] == num_processes
    assert found["mesh"] == [num_processes]
    assert found["precision"] == "bf16"
    assert found["device"].startswith(device)
    assert found["prefetch"] == 2
    expected = {name: str(held) for name, (_, held) in ANSWERS.items()} | {
        "replicate_size": "None",
        "shard_size": str(num_processes),
        "runtime_dtype": "None",
        "reshard_after_forward": "True",
    }
    assert found["plugin"] == expected
    # Attention's backward adds up in no fixed order on a GPU.
    assert found["resumed"] == pytest.approx(found["losses"], rel=0 if device == "cpu" else 1e-3)
