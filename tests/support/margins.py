"""How near every comparison with a bound came to it.

Where ``SSHSDP_MARGINS`` names a file, each comparison (those of `tests.support.compare`,
``torch.testing.assert_close`` and ``pytest.approx``) appends ``error / bound`` to it, under the
name of the test. ``python -m tests.support.margins FILE ...`` prints the nearest ones, and
`tests.portable` does so after running all tests in several ways.

Exact comparisons have no margin and are not recorded.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["FILE", "TEST", "describe", "install", "nearest", "record"]

FILE = "SSHSDP_MARGINS"
# What pytest calls the running test; `tests.support.workers` hands it on to its processes.
TEST = "PYTEST_CURRENT_TEST"


def record(error: float, bound: float, what: str = "") -> None:
    """Note that ``error`` had to be at most ``bound``."""
    file = os.environ.get(FILE)
    if not file or not bound or math.isinf(bound):
        return
    entry = {
        "test": os.environ.get(TEST, "").rpartition(" (")[0],
        "ratio": error / bound,
        "error": error,
        "bound": bound,
        "what": what,
    }
    # One short write to a file that is open for appending is not torn by another process's.
    with Path(file).open("a") as lines:
        lines.write(json.dumps(entry) + "\n")


def install() -> None:
    """Record what torch and pytest compare, in this process, if a file is named."""
    if not os.environ.get(FILE):
        return
    from _pytest.approx import ApproxScalar
    from torch.testing._comparison import NumberPair, TensorLikePair

    compare_tensors = TensorLikePair._compare_regular_values_close
    compare_numbers = NumberPair.compare
    equals = ApproxScalar.__eq__

    def tensors(
        self: Any, actual: Any, expected: Any, *, rtol: float, atol: float, **rest: Any
    ) -> Any:
        if actual.numel() and actual.dtype.is_floating_point:
            left, right = actual.detach().double(), expected.detach().double()
            ratio = ((left - right).abs() / (atol + rtol * right.abs()).clamp(min=1e-300)).max()
            if atol or rtol:
                record(ratio.item(), 1.0, f"assert_close(rtol={rtol:g}, atol={atol:g})")
        compare_tensors(self, actual, expected, rtol=rtol, atol=atol, **rest)

    def numbers(self: Any) -> None:
        bound = self.atol + self.rtol * abs(self.expected)
        record(abs(self.actual - self.expected), bound, "assert_close of numbers")
        compare_numbers(self)

    def approx(self: Any, actual: Any) -> bool:
        if isinstance(actual, float | torch.Tensor) and isinstance(self.expected, float | int):
            record(abs(float(actual) - self.expected), float(self.tolerance), "approx")
        return bool(equals(self, actual))

    TensorLikePair._compare_regular_values_close = tensors
    NumberPair.compare = numbers
    ApproxScalar.__eq__ = approx


def nearest(files: list[Path], count: int = 10) -> list[dict[str, Any]]:
    """The ``count`` tests that came nearest to a bound, each with its nearest comparison."""
    worst: dict[str, dict[str, Any]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            seen = worst.get(entry["test"])
            if seen is None or not entry["ratio"] <= seen["ratio"]:
                worst[entry["test"]] = {**entry, "run": file.stem}
    return sorted(worst.values(), key=lambda entry: -entry["ratio"])[:count]


def describe(one: dict[str, Any]) -> str:
    """An entry of `nearest` in two lines."""
    return (
        f"{one['ratio']:8.1%} of the bound: {one['test']}\n"
        f"          {one['error']:.2e} of {one['bound']:.2e}  {one['what']}  [{one['run']}]"
    )


if __name__ == "__main__":
    print("\n".join(map(describe, nearest([Path(name) for name in sys.argv[1:]]))))
