"""Worker groups for the Lightning tests, one of each size for the whole session."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from workers import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


def _group(size: int) -> Iterator[WorkerGroup]:
    group = WorkerGroup(size)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[WorkerGroup]:
    """A world of one process."""
    yield from _group(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[WorkerGroup]:
    """A world of two processes."""
    yield from _group(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[WorkerGroup]:
    """A world of four processes."""
    yield from _group(4)


@pytest.fixture(autouse=True)
def _quiet_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
