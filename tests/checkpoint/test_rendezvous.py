"""Ranks that fail or do not come are named on the others, and the next call works again."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sshsdp.comm import rendezvous
from sshsdp.comm.rendezvous import together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def call(caller: str, timeout: float = 60.0, error: Exception | None = None) -> str:
    """Come together; the message of what went wrong, or nothing."""

    def prepare() -> str:
        if error is not None:
            raise error
        return ""

    before = rendezvous.MISSING_RANKS_TIMEOUT
    rendezvous.MISSING_RANKS_TIMEOUT = timedelta(seconds=timeout)
    try:
        return together(caller, prepare)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    finally:
        rendezvous.MISSING_RANKS_TIMEOUT = before


def some_come(rounds: Sequence[Sequence[int]]) -> list[str]:
    """Only the ranks of each round call, one round after another."""
    messages = []
    for number, ranks in enumerate(rounds):
        if dist.get_rank() in ranks:
            messages.append(call(f"call {number}", timeout=(1.0, 5.0, 60.0)[len(ranks) - 1]))
        dist.barrier()
    return messages


def test_missing_ranks_are_named_and_later_calls_work(workers: Callable[[int], Any]) -> None:
    """huggingface/accelerate#2000: `if is_main: save()` hung, and so did what came after."""
    everyone = (0, 1, 2)
    rounds = [everyone, (0,), (1, 2), everyone, (0,), everyone]
    first, second, third = workers(3).run(some_come, rounds)
    assert "call 1 is collective, and ranks [1, 2] did not call it within 1 s" in first[1]
    assert "call 2 is collective, and ranks [0] did not call it" in second[1]
    assert "call 2 is collective, and ranks [0] did not call it" in third[1]
    assert "ranks [1, 2]" in first[3]
    assert [first[i] for i in (0, 2, 4)] == [""] * 3
    assert [second[i] for i in (0, 2, 3)] == [""] * 3


def one_fails() -> list[str]:
    """Rank 1 fails alone, then nobody does."""
    error = OSError("no space left") if dist.get_rank() == 1 else None
    return [call("save()", error=error), call("save()")]


def test_a_failure_of_one_rank_is_told_on_all(workers: Callable[[int], Any]) -> None:
    results = workers(2).run(one_fails)
    expected = "RuntimeError: save() failed on other ranks: rank 1: OSError: no space left"
    assert results[0][0] == expected
    assert results[1][0] == "OSError: no space left"
    assert [result[1] for result in results] == ["", ""]


def count_keys() -> int:
    """Keys in the store after many calls."""
    for _ in range(20):
        together("save()", lambda: None)
    dist.barrier()
    return dist.distributed_c10d._get_default_store().num_keys()


def test_calls_do_not_fill_the_store(workers: Callable[[int], Any]) -> None:
    together_keys = workers(2).run(count_keys)[0]
    assert together_keys < 40


def test_without_a_process_group_there_is_nobody_to_wait_for() -> None:
    assert call("save()") == ""
    assert call("save()", error=ValueError("wrong")) == "ValueError: wrong"
