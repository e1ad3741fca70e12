"""``accelerate-sshsdp config``: the questions, and the ordinary Accelerate YAML that they lead to.

Accelerate's own ``accelerate config`` has no place for questions of others. What is written here is
a file of Accelerate's: ``accelerate launch --config_file`` starts programs with it, ``accelerate
config update`` and ``accelerate env`` keep our keys, and `accelerate_sshsdp.configuration` reads
them in the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import ComputeEnvironment, DistributedType

from accelerate_sshsdp.plugin import SSHSDPPlugin
from accelerate_sshsdp.settings import SETTINGS, Setting, flag, integer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ask_configuration"]

T = TypeVar("T")

_PRECISIONS = ("no", "fp16", "bf16", "mxfp8")
_SIZES = ("replicate_size", "shard_size")


def ask_configuration() -> ClusterConfig:
    """Ask everything; wrong answers are refused, with the field's name, and asked again.

    Raises:
        EOFError: There are no more answers.
    """
    place = _ask_place()
    precision = _ask(
        "mixed_precision",
        f"Which mixed precision ({', '.join(_PRECISIONS)})? [no]: ",
        _one_of(_PRECISIONS),
        "no",
    )
    answers: dict[str, Any] = {name: None for name in SETTINGS}
    if not _ask(
        "defaults", "Keep the defaults of SS-HSDP for everything else? [YES/no]: ", flag, True
    ):
        answers = _ask_settings(place["num_processes"], precision)
    if precision == "mxfp8":
        # Accelerate's launcher knows no such precision: bf16 it is, for all that is not in MXFP8.
        answers["runtime_format"], precision = "mxfp8", "bf16"
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.FSDP,
        mixed_precision=precision,
        debug=False,
        main_training_function="main",
        **place,
        **_sections(answers),
    )


def _ask_place() -> dict[str, Any]:
    """Machines and processes."""
    place: dict[str, Any] = {}
    machines = _ask("num_machines", "How many machines? [1]: ", _least(1), 1)
    place["num_machines"] = machines
    if machines > 1:
        place["machine_rank"] = _ask(
            "machine_rank",
            f"The number of this machine (0 to {machines - 1})? [0]: ",
            _between(0, machines - 1),
            0,
        )
        place["main_process_ip"] = _ask(
            "main_process_ip", "Address of machine 0? ", _not_empty, None
        )
        place["main_process_port"] = _ask(
            "main_process_port", "Port of machine 0? [29500]: ", _between(1, 65535), 29500
        )
    has_accelerator = torch.accelerator.is_available()
    place["use_cpu"] = _ask(
        "use_cpu",
        f"Train on the CPU? [{'yes/NO' if has_accelerator else 'YES/no'}]: ",
        flag,
        not has_accelerator,
    )
    each = 1 if place["use_cpu"] else max(torch.accelerator.device_count(), 1)
    place["num_processes"] = _ask(
        "num_processes",
        f"How many processes on all machines together? [{each * machines}]: ",
        _least(machines),
        each * machines,
    )
    return place


def _ask_settings(num_processes: int, precision: str) -> dict[str, Any]:
    answers: dict[str, Any] = {}

    def check_sizes() -> None:
        SSHSDPPlugin(
            replicate_size=answers["replicate_size"] or "auto",
            shard_size=answers["shard_size"] or "auto",
        ).mesh_sizes(num_processes)

    def check_format() -> None:
        dtype = answers["runtime_dtype"] or "auto"
        is_half = dtype == "float16" or (dtype == "auto" and precision == "fp16")
        is_quantized = answers["runtime_format"] == "mxfp8" or precision == "mxfp8"
        if is_quantized and (is_half or dtype == "float64"):
            raise ValueError(
                "runtime_format=mxfp8 computes in float32 or bfloat16, and runtime_dtype or "
                "mixed_precision says otherwise"
            )

    for name, setting in SETTINGS.items():
        answers[name] = _ask_setting(setting)
        if name == "shard_size":
            _ask_again(_SIZES, answers, check_sizes)
        if name == "runtime_format":
            _ask_again(("runtime_dtype", "runtime_format"), answers, check_format)
    return answers


def _ask_again(names: tuple[str, ...], answers: dict[str, Any], check: Callable[[], None]) -> None:
    """Until answers that depend on each other go together."""
    while True:
        try:
            check()
            return
        except ValueError as error:
            print(error)
        for name in names:
            answers[name] = _ask_setting(SETTINGS[name])


def _ask_setting(setting: Setting) -> Any:
    """The answer as it is to be written: a flag, a number, or text; None for the default."""

    def convert(text: str) -> Any:
        if not text:
            return None
        value = setting.parse(text)
        return value if isinstance(value, (bool, int)) else text

    return _ask(setting.name, setting.question, convert, None)


def _sections(answers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The YAML's sections for SS-HSDP, with the defaults written out where they can be."""
    fsdp: dict[str, Any] = {
        "fsdp_version": 2,
        # Each rank needs the weights that it loads; with this, only rank 0 would have them.
        "fsdp_cpu_ram_efficient_loading": False,
    }
    mesh: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        answer = answers[name]
        if name in _SIZES:
            if answer not in (None, "auto"):
                mesh[setting.key] = answer
            continue
        default = "auto" if setting.default is None else setting.default
        written = default if answer is None else answer
        if written != {}:
            fsdp[setting.key] = written
    return {"fsdp_config": fsdp, "parallelism_config": mesh}


# Asking


def _ask(name: str, question: str, convert: Callable[[str], T], default: T | None) -> T:
    while True:
        text = input(question).strip()
        if not text and default is not None:
            return default
        try:
            return convert(text)
        except ValueError as error:
            print(f"{name} {error}, got {text!r}")


def _least(least: int) -> Callable[[str], int]:
    return lambda text: integer(text, least)


def _between(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = integer(text, least)
        if number > most:
            raise ValueError(f"must be {most} at most")
        return number

    return convert


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text.lower()

    return convert


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("is needed")
    return text
