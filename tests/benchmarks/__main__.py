"""Step time, memory and copied bytes of sshsdp against FSDP2, in one run on two gloo ranks.

Everything that is compared is timed in turns in the same two processes; the printed figures are
ratios of medians. Memory is measured in processes of its own for each contender.

    python -m tests.benchmarks             # full: several minutes
    python -m tests.benchmarks --rounds 1  # a look
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.measuring import measure


def _tables(report: dict[str, Any]) -> list[Table]:
    steps = Table(title="Step time, relative to FSDP2 (same run, medians)")
    steps.add_column("")
    for count in report["step_seconds"]:
        steps.add_column(f"{count} micro-batch(es)", justify="right")
    for name in next(iter(report["step_seconds"].values())):
        ratios = [t[name] / t["FSDP2"] for t in report["step_seconds"].values()]
        steps.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    space = Table(title="Copied bytes in a step (1 = the parameters' bytes), peak resident memory")
    for column in ("", "copied", "peak memory, GiB"):
        space.add_column(column, justify="right" if column else "left")
    for name, copied in report["copied_bytes"].items():
        peak = report["peak_rss_bytes"].get(name)
        shown = f"{peak / 2**30:.2f}" if peak else ""
        space.add_row(name, f"{copied / report['parameter_bytes']:.2f}", shown)
    muon = Table(title="Muon, relative to FSDP2 (same run, medians)")
    muon.add_column("")
    for part in ("whole step", "optimizer alone"):
        muon.add_column(part, justify="right")
    base = report["muon_seconds"]["FSDP2, every matrix gathered"]
    for name, seconds in report["muon_seconds"].items():
        muon.add_row(name, *(f"{a / b:.2f}" for a, b in zip(seconds, base, strict=True)))
    return [steps, space, muon]


def main() -> None:
    """Run the benchmark and print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one to warm up")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a micro-batch")
    args = parser.parse_args()
    report = measure(args.rounds, args.tokens)
    console = Console(file=sys.stdout)
    for table in _tables(report):
        console.print(table)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
