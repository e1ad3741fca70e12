"""The ``accelerate-sshsdp`` command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.commands.config.config_args import default_yaml_config_file

from accelerate_sshsdp.questionnaire import ask_configuration

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: Of the command line; default: ``sys.argv``.
    """
    parser = argparse.ArgumentParser("accelerate-sshsdp", description=__doc__)
    commands = parser.add_subparsers(required=True)
    config = commands.add_parser(
        "config",
        help="ask how to train, and write a configuration file for `accelerate launch`",
    )
    config.add_argument(
        "--config_file",
        default=default_yaml_config_file,
        help="where to write it (default: Accelerate's own default file, %(default)s)",
    )
    options = parser.parse_args(arguments)
    path = Path(options.config_file)
    if path.suffix not in (".yaml", ".yml"):
        parser.error(f"--config_file must end in .yaml, got {path}")
    _write(path)


def _write(path: Path) -> None:
    try:
        configuration = ask_configuration()
    except EOFError:
        raise SystemExit("accelerate-sshsdp config: no more answers; nothing was written") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    configuration.to_yaml_file(path)
    print(f"accelerate configuration saved at {path}")
    if str(path) != default_yaml_config_file:
        print(f"start programs with: accelerate launch --config_file {path} program.py")


if __name__ == "__main__":
    main()
