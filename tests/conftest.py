"""Fixtures for all tests; what needs a GPU is skipped where there is none."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import margins
from tests.support.interpreters import waiting_interpreter
from tests.support.subject import in_double
from tests.support.workers import NUM_THREADS, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.interpreters import Interpreter

margins.install()

# As in the workers: sums over several threads round otherwise, and references must not differ.
torch.set_num_threads(NUM_THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "double" in getattr(item, "fixturenames", ()):
            item.add_marker("numerical")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def double() -> Iterator[None]:
    """Models and data are in float64, here and in `workers`: see `tests.support.compare`."""
    with in_double():
        yield


class Workers:
    """The ranks of one world size."""

    def __init__(self, pool: WorkerPool, size: int) -> None:
        self.size = size
        self.run: Callable[..., list[Any]] = functools.partial(pool.run, size)


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """The processes behind `workers`, started when a test first needs them."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def workers(worker_pool: WorkerPool) -> Callable[[int], Workers]:
    """``workers(2).run(function, *args)`` calls a function on two ranks; results come by rank."""
    return functools.partial(Workers, worker_pool)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs programs in forks of a process that has imported torch; see `waiting_interpreter`."""
    with waiting_interpreter() as interpreter:
        yield interpreter
