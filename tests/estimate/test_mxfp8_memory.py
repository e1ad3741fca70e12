"""MXFP8 in the plan and in the engine: bytes kept, gathered and sent, per element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import sshsdp
from sshsdp.estimate.costs import model_cost
from sshsdp.estimate.memory import rank_memory
from sshsdp.estimate.optimizers import optimizer_cost
from sshsdp.estimate.wire import expected_wire_bytes
from tests.benchmarks.contenders import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, NUM_LAYERS, VOCABULARY = 64, 3, 96


def measure(runtime_format: Any) -> dict[str, Any]:
    """Two steps of a small decoder; what is there and what the plan says."""
    torch.manual_seed(0)
    model = Decoder(WIDTH, NUM_LAYERS, VOCABULARY)
    runtime, update = sshsdp.RuntimePolicy(format=runtime_format), sshsdp.UpdatePolicy()
    engine = sshsdp.shard(model, runtime=runtime, update=update)
    optimizer = engine.attach(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(torch.randint(0, VOCABULARY, (1, 16))).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = {kind: nbytes for kind, nbytes in engine.stats.wire.nbytes.items() if nbytes}
    predicted = rank_memory(model_cost(engine.layout, runtime, update), optimizer_cost("adamw"))
    blocks = [space for space in engine.spaces if space.runtime.element_dtype.itemsize == 1]
    found = {
        "wire": (counted, expected_wire_bytes(engine.layout, runtime, update)),
        "runtime_shards": (
            sum(space.runtime.shard_nbytes for space in engine.spaces),
            predicted.runtime_shards,
        ),
        "masters": (
            sum(space.update_shard.nbytes for space in engine.spaces),
            predicted.masters,
        ),
        "peak_gathered": (engine.stats.peak_gathered_bytes, predicted.gathered_units),
        "bytes_per_element": [
            space.runtime.shard_nbytes / space.layout.shard_numel for space in blocks
        ],
    }
    engine.close()
    return found


@pytest.mark.parametrize("runtime_format", [None, "mxfp8"])
def test_the_plan_predicts_what_is_kept_and_sent(
    workers: Callable[[int], Any], runtime_format: str | None
) -> None:
    for rank in workers(2).run(measure, runtime_format):
        for kind in ("wire", "runtime_shards", "masters", "peak_gathered"):
            measured, predicted = rank[kind]
            assert measured == predicted, kind
        # Data and scales, in both orientations.
        expected = [2 * 33 / 32] * NUM_LAYERS if runtime_format else []
        assert rank["bytes_per_element"] == expected
