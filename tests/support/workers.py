"""Worker processes that stay up while test after test runs on them.

Importing torch takes seconds, making a gloo process group milliseconds. So the processes are forked
from one that has imported it, and live as long as the test session; every `WorkerPool.run` gets a
process group of its own, of the size that it asks for. A run that fails or hangs ends the
processes; the next one starts new ones.

Example:
    >>> results = pool.run(2, torch.distributed.get_rank)  # doctest: +SKIP
    [0, 1]
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.support import margins
from tests.support.subject import SEED

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["NUM_THREADS", "WorkerPool", "WorkersFailedError"]

DEFAULT_TIMEOUT = 90.0
# Of every process; more would wait for each other where ranks share a few cores.
NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
# Imported once, by the process that workers are forked from: it takes seconds.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "accelerate",
    "lightning.pytorch",
    "lightning.fabric",
    "sshsdp",
]
# How long the other ranks may take to fail too, once one has: they often wait for it.
GRACE_AFTER_FAILURE = 8.0


class WorkersFailedError(AssertionError):
    """Some rank raised, died or did not answer; the message tells of every rank."""


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: int
    store: str
    timeout: float
    test: str
    default_dtype: torch.dtype


class _Worker:
    """One process, seen from the test session."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.rank = rank
        self.stacks = folder / f"stacks.{rank}"
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(rank, theirs, self.stacks), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, job: _Job) -> None:
        # Plain pickle: multiprocessing's own would pass tensors as shared memory.
        self.connection.send_bytes(pickle.dumps(job))

    def receive(self) -> tuple[bool, Any]:
        """``(succeeded, result or traceback)``."""
        try:
            answer: tuple[bool, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return False, f"the process died with exit code {self.process.exitcode}"
        return answer

    def where(self) -> str:
        """The stack of every thread of the process, now."""
        if not self.process.is_alive() or self.process.pid is None:
            return f"the process died with exit code {self.process.exitcode}"
        os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            if self.stacks.exists() and self.stacks.stat().st_size:
                time.sleep(0.1)
                return self.stacks.read_text()
        return "no stack to be had"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Processes on which functions run as the ranks of one process group."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._folder = Path(tempfile.mkdtemp(prefix="workers-"))
        self._workers: list[_Worker] = []
        self._num_runs = 0

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on ``size`` ranks at once.

        Args:
            size: World size of the process group.
            function: A module-level function; inside, the default process group (gloo) is there,
                and torch's default dtype is the caller's.
            args: Picklable.
            timeout: Seconds until the run is given up, and its processes with it.
            kwargs: Picklable.

        Returns:
            What the ranks returned, by rank.

        Raises:
            WorkersFailedError: With the traceback, or the present stack, of every rank.
        """
        while len(self._workers) < size:
            self._workers.append(_Worker(len(self._workers), self._folder))
        self._num_runs += 1
        store = str(self._folder / f"store.{self._num_runs}")
        test = os.environ.get(margins.TEST, "")
        dtype = torch.get_default_dtype()
        job = _Job(function, args, kwargs, size, store, timeout, test, dtype)
        workers = self._workers[:size]
        for worker in workers:
            worker.send(job)
        answers = self._collect(workers, timeout)
        if all(succeeded for succeeded, _ in answers.values()) and len(answers) == size:
            return [answers[rank][1] for rank in range(size)]
        message = self._describe(workers, answers, timeout)
        self.stop()
        raise WorkersFailedError(message)

    def _collect(self, workers: list[_Worker], timeout: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(workers):
            waiting = {w.connection: w for w in workers if w.rank not in answers}
            ready: list[Any] = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                worker = waiting[connection]
                answers[worker.rank] = worker.receive()
                if not answers[worker.rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
        return answers

    def _describe(
        self, workers: list[_Worker], answers: dict[int, tuple[bool, Any]], timeout: float
    ) -> str:
        parts = []
        for worker in workers:
            succeeded, answer = answers.get(worker.rank, (False, None))
            if succeeded:
                text = "returned"
            elif answer is not None:
                text = answer
            else:
                text = f"gave no answer (time limit {timeout:.0f} s) and is here:\n{worker.where()}"
            parts.append(f"--- rank {worker.rank} of {len(workers)} {text}")
        return "\n".join(parts)

    def stop(self) -> None:
        """Kill the processes; the next `run` starts new ones."""
        for worker in self._workers:
            worker.stop()
            worker.stacks.unlink(missing_ok=True)
        self._workers = []

    def close(self) -> None:
        """Kill the processes and remove what they left."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(rank: int, connection: Connection, stacks: Path) -> None:
    """The life of a worker process."""
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.update(OMP_NUM_THREADS=str(NUM_THREADS), TOKENIZERS_PARALLELISM="false")
        if Path("/sys/class/net/lo").exists():
            # Without it gloo resolves the host's name, which need not have an address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(NUM_THREADS)
        margins.install()
        warnings.simplefilter("ignore")
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            try:
                answer = (True, _run(pickle.loads(request), rank))
                payload = pickle.dumps(answer)
            except BaseException:
                payload = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
            connection.send_bytes(payload)
            sys.stdout.flush()
            _collect_garbage()


def _collect_garbage() -> None:
    """End engines that a run has left open, and with them the threads of their process groups."""
    # An autograd graph that was never run goes layer by layer.
    while gc.collect():
        pass
    # What is alive now (imported modules, mostly) need not be looked at each time.
    gc.freeze()


def _run(job: _Job, rank: int) -> Any:
    os.environ[margins.TEST] = job.test
    torch.set_default_dtype(job.default_dtype)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.size),
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=max(job.timeout - 10, 5)),
    )
    try:
        torch.manual_seed(SEED)
        return job.function(*job.args, **job.kwargs)
    finally:
        # Peers that wait for this rank then fail at once instead of at the time limit.
        dist.destroy_process_group()
