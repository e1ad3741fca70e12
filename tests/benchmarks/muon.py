"""Muon on sharded matrices against what users of FSDP2 do: gather every matrix on every rank.

Newton-Schulz runs in float32 everywhere: bfloat16 products are emulated on most CPUs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import sshsdp
from sshsdp.optim import muon_with_adamw
from sshsdp.optim.newton_schulz import COEFFICIENTS, orthogonalize
from tests.benchmarks.contenders import Contender, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

WIDTH, NUM_LAYERS, VOCABULARY = 384, 6, 1024
LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.95


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(WIDTH, NUM_LAYERS, VOCABULARY)


def _sshsdp(method: str) -> Contender:
    model = _decoder()
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.float32))
    optimizer: Any = muon_with_adamw(
        model,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        ns_dtype=torch.float32,
        method=method,
    )
    return Contender(model, engine.attach(optimizer), engine)


class GatheringMuon(torch.optim.Optimizer):
    """The common recipe for DTensors: momentum on shards, everything else on whole matrices."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": LR})
        self._adamw = torch.optim.AdamW(others, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Gather, orthogonalize and take this rank's rows, one matrix after the other."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"]
            buffer.lerp_(parameter.grad, 1 - MOMENTUM)
            update: DTensor = parameter.grad.lerp(buffer, MOMENTUM)
            direction = orthogonalize(
                update.full_tensor()[None],
                coefficients=COEFFICIENTS,
                num_steps=5,
                eps=1e-7,
                dtype=torch.float32,
            )[0]
            local = parameter.to_local()
            rows = direction.chunk(parameter.device_mesh.size())[parameter.device_mesh.get_rank()]
            local.mul_(1 - LR * WEIGHT_DECAY)
            local.add_(rows, alpha=-LR * 0.2 * max(parameter.shape) ** 0.5)
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of both."""
        super().zero_grad(set_to_none)
        self._adamw.zero_grad(set_to_none)


def _fsdp2() -> Contender:
    model = _decoder()
    for module in [*model.layers, model]:
        fully_shard(module)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    return Contender(model, GatheringMuon(matrices, others), None)


MUON_CONTENDERS: dict[str, Callable[[], Contender]] = {
    "sshsdp, owner": partial(_sshsdp, "owner"),
    "sshsdp, gram": partial(_sshsdp, "gram"),
    "FSDP2, every matrix gathered": _fsdp2,
}
