"""Runs examples as a user does, in processes of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.interpreters import Interpreter

ROOT = Path(__file__).parents[2]


def run_example(
    interpreter: Interpreter,
    script: str,
    *options: str,
    cwd: Path | None = None,
    launcher: Sequence[str] = (),
) -> str:
    """Run a script of ``examples/``.

    Args:
        interpreter: What runs it.
        script: Its name.
        *options: Of its command line.
        cwd: Where it runs.
        launcher: What Python is given before the script, such as ``("-m", "torch...")``.

    Returns:
        What it printed.
    """
    finished = subprocess.run(
        [interpreter.executable, *launcher, str(ROOT / "examples" / script), *options],
        capture_output=True,
        text=True,
        env=interpreter.environment,
        cwd=cwd,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def last_line(
    interpreter: Interpreter, script: str, *options: str, launcher: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a script whose last line is a JSON object; returns that."""
    output = run_example(interpreter, script, *options, launcher=launcher)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
