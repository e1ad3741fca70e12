"""Runs examples as a user does, in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]


def run_example(
    script: str, *options: str, cwd: Path | None = None, launcher: Sequence[str] = ()
) -> str:
    """Run a script of ``examples/``, which is not to take this process for its launcher.

    Args:
        script: Its name.
        *options: Of its command line.
        cwd: Where it runs.
        launcher: What Python is given before the script, such as ``("-m", "torch...")``.

    Returns:
        What it printed.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "core"), str(ROOT)])
    environment["OMP_NUM_THREADS"] = "1"
    finished = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / script), *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def last_line(script: str, *options: str, launcher: Sequence[str] = ()) -> dict[str, Any]:
    """Run a script whose last line is a JSON object; returns that."""
    output = run_example(script, *options, launcher=launcher)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
