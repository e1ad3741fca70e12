"""The worker pool itself: results, failures and hangs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.support.workers import WorkerPool, WorkersFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def sum_of_ranks(offset: int) -> tuple[int, float, int]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_world_size(), value.item(), os.getpid()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one does not like this")
    dist.barrier()


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_ranks_of_any_size_run_in_the_same_processes(workers: Callable[[int], Any]) -> None:
    four = workers(4).run(sum_of_ranks, 1)
    two = workers(2).run(sum_of_ranks, 10)
    assert [(size, total) for size, total, _ in four] == [(4, 10.0)] * 4
    assert [(size, total) for size, total, _ in two] == [(2, 21.0)] * 2
    assert [pid for _, _, pid in two] == [pid for _, _, pid in four[:2]]


def test_a_failure_is_told_with_the_traceback_of_every_rank(pool: WorkerPool) -> None:
    with pytest.raises(WorkersFailedError, match="rank one does not like this") as caught:
        pool.run(2, fail_on_rank_one)
    text = str(caught.value)
    assert "--- rank 0 of 2" in text
    assert text.count("fail_on_rank_one") >= 2
    assert pool.run(2, sum_of_ranks, 0)[0][1] == 1.0


def test_a_hang_ends_at_the_time_limit_and_says_where_it_is(pool: WorkerPool) -> None:
    with pytest.raises(WorkersFailedError, match=r"no answer \(time limit 6 s\)") as caught:
        pool.run(2, hang_on_rank_zero, timeout=6)
    assert "in hang_on_rank_zero" in str(caught.value)


def test_a_dead_process_is_told_with_its_exit_code(pool: WorkerPool) -> None:
    with pytest.raises(WorkersFailedError, match="exit code 3"):
        pool.run(2, die_on_rank_one)
