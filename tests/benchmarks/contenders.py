"""Who is compared: the same decoder under sshsdp, under FSDP2, and alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, WIDTH, NUM_LAYERS, HEAD_DIM = 8192, 768, 9, 64


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        normed = self.attention_norm(hidden)
        q, k, v = (
            projection(normed).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down_proj(functional.gelu(self.up_proj(self.mlp_norm(hidden))))


class Decoder(nn.Module):
    """A decoder of 70 million parameters with tied embeddings; returns its loss."""

    def __init__(
        self, width: int = WIDTH, num_layers: int = NUM_LAYERS, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Contender(NamedTuple):
    """A model, its optimizer, and its engine if it has one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: sshsdp.Engine | None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _sshsdp(*, native: bool = False, runtime_format: Literal["mxfp8"] | None = None) -> Contender:
    os.environ["SSHSDP_NATIVE_COLLECTIVES"] = "1" if native else "0"
    model = Decoder()
    runtime = sshsdp.RuntimePolicy(dtype=torch.float32, format=runtime_format)
    engine = sshsdp.shard(model, runtime=runtime)
    return Contender(model, engine.attach(_adamw(model)), engine)


class _PointToPoint:
    """FSDP2's hooks for the primitives that sshsdp uses on gloo."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def _exchange(group: dist.ProcessGroup, outgoing: Any, incoming: Any) -> None:
    operations = []
    for peer in range(group.size()):
        if peer != group.rank():
            operations.append(dist.P2POp(dist.isend, outgoing(peer), group=group, group_peer=peer))
            operations.append(dist.P2POp(dist.irecv, incoming(peer), group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class _AllGather(_PointToPoint):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        slots = output_tensor.view(group.size(), -1)
        if slots[group.rank()].data_ptr() != input_tensor.data_ptr():
            slots[group.rank()].copy_(input_tensor.view(-1))
        flat = input_tensor.view(-1)
        _exchange(group, lambda peer: flat, lambda peer: slots[peer])


class _ReduceScatter(_PointToPoint):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        slots = input_tensor.view(group.size(), -1)
        received = torch.empty_like(slots)
        _exchange(group, lambda peer: slots[peer], lambda peer: received[peer])
        received[group.rank()] = slots[group.rank()]
        torch.sum(received, 0, out=output_tensor.view(-1))


def _fsdp2(*, point_to_point: bool) -> Contender:
    model = Decoder()
    modules = [*model.layers, model]
    for module in modules:
        fully_shard(module)
        if point_to_point:
            module.set_custom_all_gather(_AllGather())
            module.set_custom_reduce_scatter(_ReduceScatter())
    return Contender(model, _adamw(model), None)


def _alone() -> Contender:
    model = Decoder()
    return Contender(model, _adamw(model), None)


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "sshsdp": _sshsdp,
    "sshsdp, native collectives": lambda: _sshsdp(native=True),
    "sshsdp, MXFP8": lambda: _sshsdp(runtime_format="mxfp8"),
    "sshsdp, MXFP8, native collectives": lambda: _sshsdp(native=True, runtime_format="mxfp8"),
    "FSDP2": lambda: _fsdp2(point_to_point=False),
    "FSDP2, point to point": lambda: _fsdp2(point_to_point=True),
    "compute alone": _alone,
}


def make(name: str) -> Contender:
    """A contender with the same initial weights as every other."""
    torch.manual_seed(0)
    return CONTENDERS[name]()


def train_step(contender: Contender, micro_batches: list[torch.Tensor]) -> None:
    """Forward and backward of every micro-batch, reduction on the last, optimizer step."""
    compute_gradients(contender, micro_batches)
    update(contender)


def update(contender: Contender) -> None:
    """The optimizer's part of a step."""
    contender.optimizer.step()
    contender.optimizer.zero_grad()


def compute_gradients(contender: Contender, micro_batches: list[torch.Tensor]) -> None:
    """Forward and backward of every micro-batch, reduction on the last."""
    model, _, engine = contender
    for index, tokens in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        if engine is not None and not is_last:
            with engine.no_sync():
                model(tokens).backward()
            continue
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        model(tokens).backward()
