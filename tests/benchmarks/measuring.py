"""The processes that measure: two gloo ranks that take turns between the contenders."""

from __future__ import annotations

import os
import resource
import socket
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.benchmarks.contenders import (
    CONTENDERS,
    VOCABULARY,
    compute_gradients,
    make,
    train_step,
    update,
)
from tests.benchmarks.copies import CopyCounter
from tests.benchmarks.muon import MUON_CONTENDERS
from tests.benchmarks.muon import VOCABULARY as MUON_VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import SimpleQueue

WORLD_SIZE = 2


def join(rank: int, port: int) -> int:
    """Make this process a rank, of how many is returned."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE)
    )
    dist.init_process_group("gloo")
    return WORLD_SIZE


def _timed(action: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def _raw_collectives(parameter_bytes: int, num_all_gathers: int) -> Callable[[], None]:
    """As many bytes as a step moves, through the backend's own collectives, block by block."""
    chunk = parameter_bytes // 4 // 10 // WORLD_SIZE * WORLD_SIZE
    whole, shard = torch.empty(chunk), torch.empty(chunk // WORLD_SIZE)

    def run() -> None:
        for _ in range(10):
            for _ in range(num_all_gathers):
                dist.all_gather_into_tensor(whole, shard)
            dist.reduce_scatter_tensor(shard, whole)

    return run


def _time_worker(rank: int, port: int, rounds: int, tokens: int, results: SimpleQueue[Any]) -> None:
    join(rank, port)
    contenders = {name: make(name) for name in CONTENDERS}
    nbytes = sum(p.numel() * 4 for p in contenders["compute alone"].model.parameters())
    generator = torch.Generator().manual_seed(rank)
    report: dict[str, Any] = {"parameter_bytes": nbytes, "step_seconds": {}, "copied_bytes": {}}
    for num_micro_batches in (1, 4):
        batches = [
            torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
            for _ in range(num_micro_batches)
        ]
        actions: dict[str, Callable[[], None]] = {
            name: partial(train_step, contender, batches) for name, contender in contenders.items()
        }
        actions["raw collectives"] = _raw_collectives(nbytes, 2 * num_micro_batches)
        times: dict[str, list[float]] = {name: [] for name in actions}
        for turn in range(rounds + 1):
            for name, action in actions.items():
                seconds = _timed(action)
                if turn:
                    times[name].append(seconds)
        report["step_seconds"][num_micro_batches] = {
            name: statistics.median(values) for name, values in times.items()
        }
    for name, contender in contenders.items():
        with CopyCounter() as counter:
            train_step(contender, batches[:1])
        report["copied_bytes"][name] = counter.nbytes
    if rank == 0:
        results.put(report)
    dist.destroy_process_group()


def _muon_worker(rank: int, port: int, rounds: int, tokens: int, results: SimpleQueue[Any]) -> None:
    join(rank, port)
    contenders = {name: make_one() for name, make_one in MUON_CONTENDERS.items()}
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, MUON_VOCABULARY, (1, tokens), generator=generator)]
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    updates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            before = _timed(partial(compute_gradients, contender, batches))
            seconds = _timed(partial(update, contender))
            if turn:
                steps[name].append(before + seconds)
                updates[name].append(seconds)
    if rank == 0:
        medians = {
            name: [statistics.median(steps[name]), statistics.median(updates[name])]
            for name in contenders
        }
        results.put(medians)
    dist.destroy_process_group()


def _memory_worker(rank: int, port: int, name: str, tokens: int, results: SimpleQueue[Any]) -> None:
    join(rank, port)
    contender = make(name)
    generator = torch.Generator().manual_seed(rank)
    batch = [torch.randint(0, VOCABULARY, (1, tokens), generator=generator)]
    for _ in range(3):
        train_step(contender, batch)
    if rank == 0:
        results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.destroy_process_group()


def measure(rounds: int, tokens: int) -> dict[str, Any]:
    """Times, copied bytes and peak memory, as rank 0 saw them.

    Args:
        rounds: Timed rounds after one to warm up.
        tokens: Tokens in each micro-batch.
    """
    report: dict[str, Any] = run(_time_worker, rounds, tokens)
    report["peak_rss_bytes"] = {
        name: run(_memory_worker, name, tokens) for name in ("sshsdp", "FSDP2", "compute alone")
    }
    report["muon_seconds"] = run(_muon_worker, rounds, tokens)
    report["torch"] = torch.__version__
    return report


def run(worker: Callable[..., None], *args: Any) -> Any:
    """Call ``worker(rank, port, *args, results)`` on all ranks, and give what one of them put."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    context = mp.start_processes(
        worker, (port, *args, results), nprocs=WORLD_SIZE, join=False, start_method="spawn"
    )
    assert context is not None
    while not context.join():
        pass
    return results.get()
