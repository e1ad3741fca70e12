"""Training with optimizers that see whole matrices, on a mesh and in one process.

Newton-Schulz in bf16 turns a last bit, as of a sum in another order, into a visible difference: so
`iterating_in_full` is around all steps.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import sshsdp
from tests.support.subject import Subject, by_name, widened
from tests.support.training import update_dtypes
from tests.support.zoo import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Case",
    "attach",
    "build",
    "iterating_in_full",
    "step_of",
    "train_plain",
    "train_sharded",
]


@contextlib.contextmanager
def iterating_in_full() -> Iterator[None]:
    """Have torch.optim.Muon, which casts to bfloat16, iterate in the gradients' own dtype."""
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone()):
        yield


class Experts(nn.Module):
    """A mixture of experts whose weights are packed: ``[E, out, in]``."""

    def __init__(self, width: int = 8, hidden: int = 6, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        hidden = torch.tanh(torch.einsum("bi,eoi->beo", x, self.up))
        return x + torch.einsum("be,beo,eio->bi", gates, hidden, self.down)


class MixtureOfExperts(nn.Module):
    """Layers of experts between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.norm(x))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(widened(model(batch[:, :5])), batch[:, 5:].argmax(1))


_SUBJECTS = by_name(
    [
        *SUBJECTS,
        Subject("experts", MixtureOfExperts, lambda g, rank: torch.randn(6, 9, generator=g), _loss),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained over which mesh.

    Attributes:
        subject: Name of a model.
        make: Makes the optimizers; a module-level function.
        mesh: ``(replicate, shard)``.
        steps: How many.
        micro_batches: In each step; all but the last without reducing if ``defers``.
        clip: Norm to clip to.
        sharding: Of the update state.
        dtype: Of runtime parameters; None: the model's own, of masters and sums as well.
        packs: Run with the packs that are found.
    """

    subject: str
    make: Any
    mesh: tuple[int, int] = (1, 1)
    steps: int = 20
    micro_batches: int = 1
    defers: bool = True
    clip: float | None = None
    sharding: Any = "hierarchical"
    dtype: torch.dtype | None = None
    packs: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh[0] * self.mesh[1]


def build(case: Case) -> nn.Module:
    """The untrained model."""
    return _SUBJECTS[case.subject].model().train()


def loss_of(case: Case, model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    """The loss of one rank's micro-batch, as its part of the step's."""
    subject = _SUBJECTS[case.subject]
    return subject.loss(model, subject.micro_batch(step, micro, rank)) / case.micro_batches


def attach(
    case: Case,
) -> tuple[nn.Module, sshsdp.Engine, list[torch.optim.Optimizer]]:
    """The model on this process group's mesh, with its optimizers."""
    model = build(case)
    mesh = dist.init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicate", "shard"))
    engine = sshsdp.shard(
        model,
        mesh=mesh if case.mesh[0] > 1 else None,
        units=_SUBJECTS[case.subject].units,
        runtime=sshsdp.RuntimePolicy(
            dtype=case.dtype, packs=sshsdp.find_packs(model) if case.packs else ()
        ),
        update=sshsdp.UpdatePolicy(sharding=case.sharding, **update_dtypes(case.dtype)),
    )
    return model, engine, engine.attach(case.make(model))


def step_of(
    case: Case,
    model: nn.Module,
    engine: sshsdp.Engine,
    optimizers: list[torch.optim.Optimizer],
    step: int,
) -> float | None:
    """One step; returns the norm before clipping."""
    for micro in range(case.micro_batches):
        defers = case.defers and micro + 1 < case.micro_batches
        with engine.no_sync(defers):
            loss_of(case, model, step, micro, dist.get_rank()).backward()
    norm = None if case.clip is None else engine.clip_grad_norm_(case.clip).item()
    with iterating_in_full():
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return norm


def train_sharded(case: Case) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Train on this process group; weights come on rank 0."""
    model, engine, optimizers = attach(case)
    norms = [step_of(case, model, engine, optimizers, step) for step in range(case.steps)]
    weights = engine.full_state_dict()
    engine.close()
    return weights, norms


def train_plain(case: Case) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Train in this process on the batches of all ranks."""
    model = build(case)
    optimizers = case.make(model)
    norms: list[float | None] = []
    parameters = list(model.parameters())
    for step in range(case.steps):
        rows = []
        for row in torch.arange(case.size).view(case.mesh).tolist():
            ranks = []
            for rank in row:
                model.zero_grad()
                for micro in range(case.micro_batches):
                    loss_of(case, model, step, micro, rank).backward()
                ranks.append([parameter.grad for parameter in parameters])
            rows.append([_sum(terms) for terms in zip(*ranks, strict=True)])
        for parameter, *terms in zip(parameters, *rows, strict=True):
            total = _sum(terms)
            parameter.grad = None if total is None else total / case.size
        norm = case.clip and nn.utils.clip_grad_norm_(parameters, case.clip).item()
        norms.append(norm)
        with iterating_in_full():
            for optimizer in optimizers:
                optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def _sum(terms: Any) -> torch.Tensor | None:
    there = [term for term in terms if term is not None]
    return sum(there[1:], start=there[0]) if there else None
