"""Groups of real processes that stay up and run one function after another.

Starting Lightning takes seconds, so a test session starts each group once. A group in which a
function failed may be left in the middle of a collective: it is killed, and started anew for the
next test.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

TIMEOUT = 120.0


class WorkerGroup:
    """``size`` processes that look to Lightning like the ranks of one torchrun job."""

    def __init__(self, size: int) -> None:
        """Start nothing yet."""
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank at once; returns the results by rank."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        results, failures = [], []
        for rank, connection in enumerate(self._connections):
            patience = 5.0 if failures else TIMEOUT
            if not connection.poll(patience):
                failures.append(f"rank {rank}: no answer for {patience} s")
                continue
            try:
                error, value = connection.recv()
            except EOFError:
                error, value = "the process died", None
            results.append(value)
            if error is not None:
                failures.append(f"rank {rank}: {error}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
    )
    import torch

    import lightning_sshsdp  # noqa: F401  (registers the strategy)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (None, function(*args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        connection.send(answer)
        gc.collect()
