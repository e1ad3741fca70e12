"""What an accelerator finds itself in: what must not be there, and what is missing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import get_cpu_distributed_information

from accelerate_sshsdp.configuration import CONFIG_FILE_VARIABLE, current

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "check_world",
    "drop_carriers",
    "ensure_process_group",
    "find_precision",
    "refuse_other_plugins",
    "take_parallelism",
    "wants_cpu",
]

_OTHERS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
}
_OTHER_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_FSDP": "FSDP",
}
# `accelerate launch` starts several processes, on CPU too, only for what it takes for FSDP.
_CARRIERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
_PRECISIONS = ("no", "fp16", "bf16", "mxfp8")


def refuse_other_plugins(arguments: Mapping[str, Any]) -> None:
    """Raise if something else is asked to shard as well.

    Args:
        arguments: What the accelerator was given.

    Raises:
        ValueError: An argument or the environment names another sharding plugin.
    """
    for argument, name in _OTHERS.items():
        if arguments.get(argument) is not None:
            raise ValueError(
                f"accelerate_sshsdp.Accelerator shards with SS-HSDP and cannot use {name} as well: "
                f"leave {argument} out, or use accelerate.Accelerator"
            )
    for variable, name in _OTHER_VARIABLES.items():
        if os.environ.get(variable, "false").lower() != "true":
            continue
        if name == "FSDP" and current() is not None:
            continue
        raise ValueError(
            f"accelerate_sshsdp.Accelerator shards with SS-HSDP, and the environment asks for "
            f"{name} ({variable}=true): write a configuration file with `accelerate-sshsdp "
            f"config`, or use accelerate.Accelerator. If the configuration file is one for "
            f"SS-HSDP, say where it is with {CONFIG_FILE_VARIABLE}"
        )


def take_parallelism(config: Any) -> dict[str, int]:
    """Mesh sizes out of a ``ParallelismConfig``.

    Raises:
        ValueError: It asks for more than data parallelism.
    """
    if config is None:
        return {}
    for name in ("tp_size", "cp_size", "sp_size"):
        if getattr(config, name, 1) > 1:
            raise ValueError(
                f"accelerate_sshsdp.Accelerator does data parallelism only: parallelism_config "
                f"must have {name}=1, got {getattr(config, name)}"
            )
    return {"replicate_size": config.dp_replicate_size, "shard_size": config.dp_shard_size}


def find_precision(given: Any) -> str | None:
    """The mixed precision that is asked for; None: what Accelerate takes if nothing is said.

    Args:
        given: The accelerator's argument; None for what the environment says.

    Raises:
        ValueError: It is not supported; with the list of those that are.
    """
    name = str(given or os.environ.get("ACCELERATE_MIXED_PRECISION") or "").lower()
    if name in ("", *_PRECISIONS):
        return name or None
    hint = "mxfp8 is the closest" if name == "fp8" else "there is no such precision"
    raise ValueError(
        f"mixed_precision={name!r} is not supported by accelerate_sshsdp: {hint}. Choose one of "
        f"{', '.join(_PRECISIONS)}"
    )


def wants_cpu() -> bool:
    """Whether to train on CPU although nobody said so in the program."""
    configuration = current()
    if configuration is not None and configuration.uses_cpu:
        return True
    # Without this, Accelerate would take each of several processes for the only one.
    return not PartialState._shared_state and not torch.accelerator.is_available()


def drop_carriers() -> None:
    """Take out of the environment what only carried our configuration.

    Accelerate would make an FSDP plugin of it, and transformers would load weights on rank 0 alone.
    """
    for name in _CARRIERS:
        os.environ.pop(name, None)


def check_world(num_processes: int) -> None:
    """Raise if Accelerate has not noticed that there are several processes.

    Raises:
        RuntimeError: It has not.
    """
    expected = get_cpu_distributed_information().world_size
    if expected > 1 and num_processes == 1:
        raise RuntimeError(
            f"the environment speaks of {expected} processes (WORLD_SIZE) and Accelerate's state "
            "of one, so each process would train alone. Something made the state before the "
            "accelerator, without telling it to use the CPU: make the accelerator first, or pass "
            "PartialState(cpu=True) or TrainingArguments(use_cpu=True)"
        )


def ensure_process_group() -> None:
    """Have a process group where one process trains alone; the engine speaks over it."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
