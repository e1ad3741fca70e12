"""Says what a program is doing, from its first second on: it imports nothing that takes time."""

from __future__ import annotations

import os
import time

_STARTED = time.monotonic()
# Set by torchrun, by Accelerate and for the processes that Lightning starts.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK")


def stage(doing: str) -> None:
    """Print what comes next, after the seconds since the start; on the first rank only."""
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        print(f"[{time.monotonic() - _STARTED:5.1f} s] {doing}", flush=True)
