"""Doing something on every rank, with a time limit for ranks that do not come.

Checkpoint calls are where programs forget ranks (``if rank == 0: save()``) and where one rank fails
alone (a full disk, a path that only some nodes have). Collectives would answer both with a hang, so
ranks first meet in the key-value store of the default process group::

    each rank:                  <meeting>/<rank> = what failed here, or nothing
    the last to come, or
    the first to lose patience: <meeting>/outcome = who is missing, who failed

Note: a meeting ends once. Whoever is first to count up ``<meeting>/decision`` writes the outcome,
and all that came obey it. A rank that finds an outcome before it came (the others gave up) goes on
to the next meeting, so that a later call, made by all, finds all ranks at the same meeting again.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

__all__ = ["MISSING_RANKS_TIMEOUT", "on_rank_0", "together"]

T = TypeVar("T")

# How long a save or load waits for ranks that did not call it.
MISSING_RANKS_TIMEOUT = timedelta(minutes=5)

_ROOT = "sshsdp/meeting"


def together(caller: str, prepare: Callable[[], T]) -> T:
    """Run ``prepare`` on every rank and go on only if all came and none failed. Collective.

    Args:
        caller: What the user called, for messages.
        prepare: Local; runs no collective.

    Returns:
        What ``prepare`` returned here.

    Raises:
        RuntimeError: Some ranks did not come, or another rank failed; they are named.
        Exception: What ``prepare`` raised here, after the other ranks know.
    """
    failure: Exception | None = None
    try:
        result = prepare()
    except Exception as error:
        failure = error
    outcome = _meet("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if outcome["missing"]:
        raise RuntimeError(
            f"{caller} is collective, and ranks {outcome['missing']} did not call it within "
            f"{MISSING_RANKS_TIMEOUT.total_seconds():.0f} s: call it on every rank, not on rank 0 "
            "only"
        )
    if outcome["failures"]:
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in outcome["failures"].items())
        raise RuntimeError(f"{caller} failed on other ranks: {causes}")
    return result


def on_rank_0(action: Callable[[], None], what: str) -> None:
    """Run ``action`` on rank 0 while the others wait; raise its failure on every rank."""
    failure: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            failure[0] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"{what} failed on rank 0: {failure[0]}")


def _meet(failure: str) -> dict[str, Any]:
    """Tell the other ranks what failed here; returns who is missing and who failed."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {"missing": [], "failures": {}}
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    while True:
        # Counted in the store, which lives as long as the process group.
        number = store.add(f"{_ROOT}/of/{rank}", 1)
        meeting = f"{_ROOT}/{number}"
        if not store.check([f"{meeting}/outcome"]):
            break
    store.set(f"{meeting}/{rank}", failure)
    if store.add(f"{meeting}/arrived", 1) == size:
        _conclude(store, meeting, size)
        # All ranks are here, so all have left the meeting before.
        _forget(store, f"{_ROOT}/{number - 1}", size)
    else:
        try:
            store.wait([f"{meeting}/outcome"], MISSING_RANKS_TIMEOUT)
        except RuntimeError:
            # Some stores have no class of their own for a timeout; if it is something else, such as
            # a lost connection, the next line raises it again.
            _conclude(store, meeting, size)
    outcome: dict[str, Any] = json.loads(store.get(f"{meeting}/outcome"))
    return outcome


def _conclude(store: Store, meeting: str, size: int) -> None:
    """End a meeting for everyone, unless another rank already does."""
    if store.add(f"{meeting}/decision", 1) > 1:
        return
    keys = {rank: f"{meeting}/{rank}" for rank in range(size)}
    present = [rank for rank in range(size) if store.check([keys[rank]])]
    failures = {rank: store.get(keys[rank]).decode() for rank in present}
    outcome = {
        "missing": [rank for rank in range(size) if rank not in failures],
        "failures": {rank: text for rank, text in failures.items() if text},
    }
    store.set(f"{meeting}/outcome", json.dumps(outcome))


def _forget(store: Store, meeting: str, size: int) -> None:
    for key in (*range(size), "arrived", "decision", "outcome"):
        store.delete_key(f"{meeting}/{key}")
