"""Runs examples as a user does, in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_example(script: str, *options: str, cwd: Path | None = None) -> str:
    """Run a script of ``examples/``, which is not to take this process for its launcher.

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
        [sys.executable, str(ROOT / "examples" / script), *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def last_line(script: str, *options: str) -> dict[str, Any]:
    """Run a script whose last line is a JSON object; returns that."""
    result: dict[str, Any] = json.loads(run_example(script, *options).splitlines()[-1])
    return result
