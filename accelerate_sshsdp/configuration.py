"""The configuration file: where it is, what it says, and what the launcher's command line changes.

``accelerate launch`` exports only what it knows of a YAML file, and not the file's path. So the
path is taken from ``SSHSDP_CONFIG_FILE``, or from the command line of the ``accelerate launch``
that is an ancestor of this process. A file is meant for SS-HSDP if its ``fsdp_config`` has keys
that start with ``sshsdp_``, which ``accelerate config`` writes::

    distributed_type: FSDP
    fsdp_config:
      fsdp_version: 2
      fsdp_reshard_after_forward: true
      sshsdp_units: auto
      sshsdp_prefetch: 1
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import yaml

from accelerate_sshsdp.settings import SETTINGS, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CONFIG_FILE_VARIABLE", "MARK", "Configuration", "current", "read_file", "resolve"]

logger = logging.getLogger(__name__)

CONFIG_FILE_VARIABLE = "SSHSDP_CONFIG_FILE"
# What distinguishes our keys in a section that other plugins use too.
MARK = "sshsdp_"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a configuration file says to SS-HSDP.

    Attributes:
        source: The file, for messages.
        settings: By setting name, as written.
        uses_cpu: The file's ``use_cpu``.
    """

    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    uses_cpu: bool = False


class _Launch(NamedTuple):
    """What the command line of ``accelerate launch`` says."""

    path: Path | None
    options: Mapping[str, Any]


@functools.cache
def read_file(path: Path) -> Configuration | None:
    """Read a configuration file; None if it is not meant for SS-HSDP.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has a key or a value that means nothing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration file {path}")
    # JSON is YAML.
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content = content if isinstance(content, dict) else {}
    fsdp = content.get("fsdp_config") or {}
    ours = [key for key in fsdp if str(key).startswith(MARK)]
    if not ours:
        return None
    known = {setting.key: name for name, setting in SETTINGS.items()}
    for key in ours:
        if key not in known:
            possible = ", ".join(key for key in known if key.startswith(MARK))
            raise ValueError(f"{path}: unknown key {key!r} in fsdp_config; there are {possible}")
    written = {**(content.get("parallelism_config") or {}), **fsdp}
    settings = {known[key]: value for key, value in written.items() if key in known}
    for name, value in settings.items():
        parse(name, value, str(path))
    uses_cpu = bool(content.get("use_cpu", False))
    return Configuration(source=str(path), settings=settings, uses_cpu=uses_cpu)


def current() -> Configuration | None:
    """The configuration that this process was started with, if it is meant for SS-HSDP.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has a key or a value that means nothing, or ``SSHSDP_CONFIG_FILE`` is a file
            that is not meant for SS-HSDP.
    """
    launch = _find_launch()
    variable = os.environ.get(CONFIG_FILE_VARIABLE)
    path = Path(variable).expanduser() if variable else launch.path
    configuration = None if path is None else read_file(path)
    if configuration is None:
        if variable:
            raise ValueError(
                f"{CONFIG_FILE_VARIABLE}: {path} has no keys for SS-HSDP (fsdp_config with "
                f"{MARK}...): write a file with `accelerate-sshsdp config`"
            )
        return None
    return replace(configuration, settings={**configuration.settings, **launch.options})


@functools.cache
def _find_launch() -> _Launch:
    """The ``accelerate launch`` above this process."""
    try:
        for process in psutil.Process().parents():
            arguments = _launch_arguments(process.cmdline())
            if arguments is not None:
                return _parse_launch(arguments, Path(process.cwd()))
    except psutil.Error:
        # Another user's process, or one that has ended.
        logger.debug("could not look at the launcher's command line", exc_info=True)
    return _Launch(None, {})


def _launch_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows ``accelerate launch`` in a command line; None if it is something else."""
    # Before it there are Python and its options at the most.
    for index, word in enumerate(command[:6]):
        rest = list(command[index + 1 :])
        name = Path(word).name
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return rest
        is_command = name == "accelerate" or word == "accelerate.commands.accelerate_cli"
        if is_command and rest[:1] == ["launch"]:
            return rest[1:]
    return None


def _parse_launch(arguments: list[str], folder: Path) -> _Launch:
    from accelerate.commands.config import default_config_file
    from accelerate.commands.launch import launch_command_parser

    known = launch_command_parser().parse_known_args(arguments)[0]
    # Only what was given: of these options' defaults, none is meant for us.
    given: set[str] = getattr(known, "nondefault", set())
    options = {
        name: getattr(known, setting.key)
        for name, setting in SETTINGS.items()
        if setting.key in given
    }
    if known.config_file is not None:
        return _Launch(folder / Path(known.config_file).expanduser(), options)
    default = Path(default_config_file)
    return _Launch(default if default.is_file() else None, options)


def resolve(name: str) -> Any:
    """The value of a setting that no argument gives: environment, configuration, default.

    Raises:
        ValueError: What is written there means nothing.
    """
    setting = SETTINGS[name]
    written = os.environ.get(setting.variable)
    if written:
        return parse(name, written, setting.variable)
    configuration = current()
    if configuration is None or name not in configuration.settings:
        return setting.default
    return parse(name, configuration.settings[name], configuration.source)
