"""Ranks for the Accelerate tests: the session's worker processes, dressed up as torchrun's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.workers import WorkerPool


class Ranks:
    """Runs functions on all ranks of a world that looks to Accelerate like a torchrun job."""

    def __init__(self, pool: WorkerPool, size: int) -> None:
        self._pool = pool
        self._size = size

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank at once; returns the results by rank."""
        return self._pool.run(self._size, _as_torchrun, function, *args, timeout=150)


def _as_torchrun(function: Callable[..., Any], *args: Any) -> Any:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    with patch.dict(os.environ, environment):
        forget_state()
        try:
            return function(*args)
        finally:
            forget_state()


def forget_state() -> None:
    """Accelerate keeps one state for a whole process; each test is to be a process of its own."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def one_rank(worker_pool: WorkerPool) -> Ranks:
    """A world of one process."""
    return Ranks(worker_pool, 1)


@pytest.fixture(scope="session")
def two_ranks(worker_pool: WorkerPool) -> Ranks:
    """A world of two processes."""
    return Ranks(worker_pool, 2)


@pytest.fixture(scope="session")
def four_ranks(worker_pool: WorkerPool) -> Ranks:
    """A world of four processes."""
    return Ranks(worker_pool, 4)
