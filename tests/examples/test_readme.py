"""The programs in the README run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_install = pytest.mark.skipif(
    not entry_points(group="torch.backends", name="sshsdp_lightning"),
    reason="Lightning knows the strategy without an import only where the package is installed",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def program(heading: str) -> str:
    """The Python block below a heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, f"no program below {heading!r}"
    return found.group(1)


@pytest.mark.parametrize(
    ("heading", "launcher"),
    [
        pytest.param("With Lightning", (), marks=needs_install),
        ("With Accelerate", TORCHRUN),
        ("In your own loop", TORCHRUN),
    ],
)
def test_the_program_runs_on_two_processes(
    heading: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(program(heading), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    finished = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
