"""The programs in the README run as they stand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.interpreters import Interpreter

ROOT = Path(__file__).parents[2]
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
        ("With Lightning", ()),
        ("With Accelerate", TORCHRUN),
        ("In your own loop", TORCHRUN),
    ],
)
def test_the_program_runs_on_two_processes(
    heading: str, launcher: tuple[str, ...], tmp_path: Path, interpreter: Interpreter
) -> None:
    (tmp_path / "train.py").write_text(program(heading), encoding="utf-8")
    finished = subprocess.run(
        [interpreter.executable, *launcher, "train.py"],
        cwd=tmp_path,
        env=interpreter.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
