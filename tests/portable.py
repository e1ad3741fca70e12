"""Run all tests as other machines would: with older instructions, more threads, other seeds, load.

A sum in another order, or a test that counts on time, then shows here and not on a stranger's
machine. Each run records how near comparisons came to their bounds (`tests.support.margins`); the
ten nearest are printed at the end.

Example:
    $ python -m tests.portable                  # all runs, all tests
    $ python -m tests.portable -m numerical     # further arguments are pytest's
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import margins

HALF = 0.5


@dataclass(frozen=True)
class Run:
    """One way to run the tests.

    Attributes:
        name: What is different.
        environment: Variables that make it so.
        num_busy: Endless loops beside the tests.
    """

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    num_busy: int = 0


RUNS = [
    Run(
        "oldest instructions",
        {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "OMP_NUM_THREADS": "1",
        },
    ),
    Run(
        "AVX2 and two threads",
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "OMP_NUM_THREADS": "2",
            # Threads that spin while they wait would take the cores from the other ranks.
            "OMP_WAIT_POLICY": "PASSIVE",
            "SSHSDP_SEED": "1",
        },
    ),
    Run("under load", {"OMP_NUM_THREADS": "1", "SSHSDP_SEED": "2"}, os.cpu_count() or 1),
]


def run(how: Run, file: Path, arguments: list[str]) -> int:
    """Run pytest that way; margins go to ``file``. Returns its exit status."""
    settings = " ".join(f"{name}={value}" for name, value in how.environment.items())
    print(f"\n=== {how.name}: {settings}", flush=True)
    environment = {**os.environ, **how.environment, margins.FILE: str(file)}
    with ExitStack() as stack:
        for _ in range(how.num_busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.kill)
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """All runs; 0 if every test passed, well within its bounds."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{how.name}.jsonl" for how in RUNS]
        statuses = [run(how, file, arguments) for how, file in zip(RUNS, files, strict=True)]
        found = margins.nearest([file for file in files if file.exists()])
    print("\n=== nearest to their bounds")
    print("\n".join(margins.describe(one) for one in found))
    is_near = any(not one["ratio"] <= HALF for one in found)
    if is_near:
        print("\nA comparison used more than half of its bound.")
    return int(any(statuses) or is_near)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
