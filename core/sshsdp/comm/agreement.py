"""Before the first collective on data: do all ranks want the same thing?"""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

__all__ = ["agree"]


def agree(entries: list[tuple[str, str]], error: Exception | None, what: str) -> None:
    """Compare ``entries`` over all ranks; raise on every rank if one failed or differs.

    Args:
        entries: ``(name, description)`` pairs, in an order that all ranks must share.
        error: What this rank failed with, if it did; it is raised here, after the others know.
        what: What is compared, for the message.

    Raises:
        RuntimeError: Another rank failed, or the entries differ (the first that does is named).
    """
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    message = None if error is None else f"{type(error).__name__}: {error}"
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (digest, message))
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(reports):
        if other is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {other}")
    if any(other != reports[0][0] for other, _ in reports):
        _raise_difference(entries, what)


def _raise_difference(entries: list[tuple[str, str]], what: str) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, entries)
    reference = everyone[0]
    for rank, other in enumerate(everyone):
        for index in range(max(len(reference), len(other))):
            left = reference[index] if index < len(reference) else ("(nothing)", "")
            right = other[index] if index < len(other) else ("(nothing)", "")
            if left != right:
                raise RuntimeError(
                    f"{what}: the ranks differ. Rank 0 has {left[0]} {left[1]}, rank {rank} has "
                    f"{right[0]} {right[1]}. Build the same model with the same policies on every "
                    "rank"
                )
    raise AssertionError("digests differ, entries do not")
