"""Counters of what the engine moves, copies and holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from sshsdp.comm.collectives import WireBytes

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """Counters since the end of the last optimizer step (``engine.stats``: of the last whole step).

    Attributes:
        wire: Bytes received by this rank and number of calls, by ``"<axis>/<collective>"``.
        gradient_copy_bytes: Gradients that were copied into the reduce input because their module
            has no zero-copy rule.
        publish_bytes: Runtime bytes written by publish (0 where update and runtime parameters share
            memory).
        peak_gathered_bytes: Most bytes of gathered runtime parameters at any time.
        peak_gathered_units: Most units gathered (or being gathered) at any time, the root included.
        peak_gradient_bytes: Most bytes of unsharded gradient buffers at any time.
        skipped_steps: Number of optimizers whose step was skipped
            (``UpdatePolicy.skip_nonfinite_steps``).
    """

    wire: WireBytes = field(default_factory=WireBytes)
    gradient_copy_bytes: int = 0
    publish_bytes: int = 0
    peak_gathered_bytes: int = 0
    peak_gathered_units: int = 0
    peak_gradient_bytes: int = 0
    skipped_steps: int = 0

    def wire_bytes(self, axis: str | None = None) -> int:
        """Bytes received over one mesh axis, or over all."""
        return sum(
            nbytes
            for kind, nbytes in self.wire.nbytes.items()
            if axis is None or kind.startswith(f"{axis}/")
        )

    def plus(self, other: Stats) -> Stats:
        """Counters of two stretches as one: sums, and the higher peaks."""
        total = dataclasses.replace(self, wire=WireBytes())
        for wire in (self.wire, other.wire):
            for kind, calls in wire.calls.items():
                total.wire.calls[kind] = total.wire.calls.get(kind, 0) + calls
                total.wire.nbytes[kind] = total.wire.nbytes.get(kind, 0) + wire.nbytes[kind]
        for item in dataclasses.fields(self):
            if item.name != "wire":
                values = getattr(self, item.name), getattr(other, item.name)
                merge = max if item.name.startswith("peak_") else sum
                setattr(total, item.name, merge(values))
        return total

    def roll(self) -> Stats:
        """Return a copy and start counting anew."""
        finished = dataclasses.replace(
            self, wire=WireBytes(calls=dict(self.wire.calls), nbytes=dict(self.wire.nbytes))
        )
        self.wire.calls.clear()
        self.wire.nbytes.clear()
        for item in dataclasses.fields(self):
            if item.name != "wire":
                setattr(self, item.name, 0)
        return finished
