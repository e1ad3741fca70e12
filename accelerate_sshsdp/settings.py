"""What can be set, and how each setting is written in Python, in the environment and in YAML.

One table serves the plugin, the environment variables, the configuration file and the questionnaire
of ``accelerate config``, so that a wrong value is refused with the same words wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SETTINGS", "Setting", "parse"]

_DTYPES = ("float64", "float32", "bfloat16", "float16")


def flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).strip().lower() not in known:
        raise ValueError("must be true or false")
    return known[str(value).strip().lower()]


def integer(value: Any, least: int) -> int:
    try:
        number = int(str(value).strip())
    except ValueError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"must be a whole number of {least} or more")
    return number


def _size(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    try:
        return integer(value, 1)
    except ValueError:
        raise ValueError("must be 'auto' or a whole number of 1 or more") from None


def _dtype(value: Any) -> torch.dtype:
    name = str(value).strip().removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"must be one of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _dtype_or_auto(value: Any) -> torch.dtype | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    try:
        return _dtype(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def _formats(value: Any) -> dict[str, torch.dtype]:
    """``{"*norm*": "float32"}``, or ``"*norm*=float32,lm_head.weight=float32"``."""
    if isinstance(value, str):
        pairs = [entry.partition("=") for entry in _split(value)]
        value = {pattern.strip(): dtype for pattern, _, dtype in pairs}
    if not isinstance(value, Mapping) or not all(value):
        raise ValueError("must map name patterns to dtypes, as in '*norm*=float32'")
    return {str(pattern): _dtype(dtype) for pattern, dtype in value.items()}


def _units(value: Any) -> Any:
    """None, a callable, or a list of module classes, class names and name patterns."""
    if isinstance(value, str):
        return None if value.strip().lower() == "auto" else _split(value)
    if isinstance(value, type):
        return [value]
    if callable(value):
        return value
    if not isinstance(value, Sequence) or not all(isinstance(one, (str, type)) for one in value):
        raise ValueError("must hold module classes, names of classes and name patterns")
    return list(value)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _runtime_format(value: Any) -> str | None:
    name = str(value).strip().lower()
    if name not in ("auto", "mxfp8"):
        raise ValueError("must be 'mxfp8' or 'auto'")
    return None if name == "auto" else name


def _sharding(value: Any) -> str:
    if value not in ("hierarchical", "replicated"):
        raise ValueError("must be 'hierarchical' or 'replicated'")
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One thing that can be set.

    Attributes:
        name: Field of the plugin.
        parse: Text or a YAML value to what the plugin holds; raises ValueError with "must be ...".
        default: Used if nothing sets it.
        question: What ``accelerate config`` asks.
        stock_key: Key of the YAML's ``fsdp_config`` or ``parallelism_config`` that means the same,
            and option of ``accelerate launch``.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any
    question: str
    stock_key: str | None = None

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"SSHSDP_{self.name.upper()}"

    @property
    def key(self) -> str:
        """The key in the configuration file."""
        return self.stock_key or f"sshsdp_{self.name}"


_ALL = (
    Setting(
        name="units",
        parse=_units,
        default=None,
        question="Which modules are gathered together (comma-separated class names or name "
        "patterns)? [auto]: ",
    ),
    Setting(
        name="replicate_size",
        parse=_size,
        default=None,
        question="Over how many replicas (slow links)? [auto: the number of machines]: ",
        stock_key="parallelism_config_dp_replicate_size",
    ),
    Setting(
        name="shard_size",
        parse=_size,
        default=None,
        question="Over how many ranks are runtime parameters sharded (fast links)? "
        "[auto: all ranks of a machine]: ",
        stock_key="parallelism_config_dp_shard_size",
    ),
    Setting(
        name="update_sharding",
        parse=_sharding,
        default="hierarchical",
        question="Is the optimizer state divided over all ranks (hierarchical), or only inside a "
        "replica (replicated)? [hierarchical]: ",
    ),
    Setting(
        name="reshard_after_forward",
        parse=flag,
        default=True,
        question="Free gathered parameters after forward? [YES/no]: ",
        stock_key="fsdp_reshard_after_forward",
    ),
    Setting(
        name="prefetch",
        parse=lambda value: integer(value, 0),
        default=1,
        question="How many units are gathered ahead? [1]: ",
    ),
    Setting(
        name="packs",
        parse=flag,
        default=False,
        question="Run q/k/v and gate/up projections as one matrix product? [yes/NO]: ",
    ),
    Setting(
        name="runtime_dtype",
        parse=_dtype_or_auto,
        default=None,
        question="Dtype of gathered parameters? [auto: from the mixed precision]: ",
    ),
    Setting(
        name="runtime_format",
        parse=_runtime_format,
        default=None,
        question="Format of linear layers in the units: mxfp8, or auto (that dtype)? [auto]: ",
    ),
    Setting(
        name="update_dtype",
        parse=_dtype_or_auto,
        default=None,
        question="Dtype of the master weights? [auto: float32 under mixed precision, else the "
        "model's own]: ",
    ),
    Setting(
        name="reduce_dtype",
        parse=_dtype_or_auto,
        default=None,
        question="Dtype in which gradients are summed? [auto: float32 under mixed precision, else "
        "the master's]: ",
    ),
    Setting(
        name="formats",
        parse=_formats,
        default={},
        question="Parameters with a runtime dtype of their own (such as *norm*=float32)? [none]: ",
    ),
    Setting(
        name="offload",
        parse=flag,
        default=False,
        question="Keep master weights and optimizer state on the host? [yes/NO]: ",
        stock_key="fsdp_offload_params",
    ),
    Setting(
        name="activation_checkpointing",
        parse=flag,
        default=False,
        question="Recompute the units' activations in backward? [yes/NO]: ",
        stock_key="fsdp_activation_checkpointing",
    ),
)

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _ALL}


def parse(name: str, value: Any, source: str) -> Any:
    """What a setting's written value means.

    Args:
        name: Of the setting.
        value: As written.
        source: Where it stands, for the message.

    Raises:
        ValueError: It means nothing.
    """
    try:
        return SETTINGS[name].parse(value)
    except ValueError as error:
        raise ValueError(f"{source}: {name} {error}, got {value!r}") from None
