"""One recipe, trained three ways: by plain torch in one process, by FSDP2, and by `sshsdp`.

A recipe says what is trained and how; the three functions `train_plain`, `train_fsdp2` and
`train_sshsdp` return comparable outcomes. The plain reference runs every rank's micro-batches one
after another and averages, so it does the same arithmetic on the same shapes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from tests.support.multiples import MULTIPLES
from tests.support.oddities import ODDITIES
from tests.support.subject import Subject, by_name
from tests.support.zoo import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "OWN_DTYPES",
    "Outcome",
    "Recipe",
    "make_optimizer",
    "prepare_model",
    "shard",
    "subject_of",
    "train_fsdp2",
    "train_plain",
    "train_sshsdp",
    "update_dtypes",
]

_SUBJECTS = by_name([*SUBJECTS, *ODDITIES, *MULTIPLES])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train and how.

    Attributes:
        subject: Name of a `Subject`.
        optimizer: Which; AdamW decays weights, SGD has momentum, plain SGD neither.
        micro_batches: Forward and backward passes per step.
        defer_reduction: All but the last micro-batch under ``no_sync``.
        clip: Norm to clip gradients to.
        checkpointing: ``(where, use_reentrant)`` of activation checkpointing.
        frozen: Patterns over parameter names.
        decay_by_shape: Two param groups, matrices with weight decay and the rest without.
        interleaved: Two param groups, every other parameter in each.
        prefetch: Units gathered ahead.
        reshard: Free parameters after forward.
        dtype: Compute dtype, over masters and sums in float32. None: all is in the model's own,
            torch's default dtype.
        mesh: ``(replicate, shard)``; None for a 1-D mesh.
        sharding: Of the update state over such a mesh.
        packs: Run with the packs that `sshsdp.find_packs` finds.
        mxfp8: Linear layers of repeated blocks in MXFP8; plain torch runs them by torchao.
    """

    subject: str
    optimizer: Literal["adamw", "sgd", "plain sgd"] = "adamw"
    steps: int = 10
    micro_batches: int = 1
    defer_reduction: bool = True
    clip: float | None = None
    checkpointing: tuple[str, bool] | None = None
    frozen: tuple[str, ...] = ()
    decay_by_shape: bool = False
    interleaved: bool = False
    prefetch: int = 1
    reshard: bool = True
    dtype: torch.dtype | None = None
    mesh: tuple[int, int] | None = None
    sharding: Literal["hierarchical", "replicated"] = "hierarchical"
    packs: bool = False
    mxfp8: bool = False

    @property
    def runtime_policy(self) -> sshsdp.RuntimePolicy:
        """The policy for `sshsdp.shard`."""
        return sshsdp.RuntimePolicy(
            dtype=self.dtype,
            prefetch=self.prefetch,
            reshard_after_forward=self.reshard,
            format="mxfp8" if self.mxfp8 else None,
        )

    @property
    def update_policy(self) -> sshsdp.UpdatePolicy:
        """The policy for `sshsdp.shard`."""
        return sshsdp.UpdatePolicy(sharding=self.sharding, **update_dtypes(self.dtype))


def update_dtypes(dtype: torch.dtype | None) -> dict[str, torch.dtype | None]:
    """``dtype`` and ``reduce_dtype`` of an `sshsdp.UpdatePolicy`, for a compute dtype."""
    return dict.fromkeys(("dtype", "reduce_dtype"), dtype and torch.float32)


# For `sshsdp.shard`: all is in the dtype that the model is in.
OWN_DTYPES: dict[str, Any] = {
    "runtime": sshsdp.RuntimePolicy(dtype=None),
    "update": sshsdp.UpdatePolicy(dtype=None, reduce_dtype=None),
}


@dataclass
class Outcome:
    """What training did: losses averaged over ranks and micro-batches, norms, and final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def subject_of(recipe: Recipe) -> Subject:
    """The subject that a recipe names."""
    return _SUBJECTS[recipe.subject]


def prepare_model(recipe: Recipe) -> nn.Module:
    """The untrained model, frozen and checkpointed as the recipe says."""
    model = subject_of(recipe).model()
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in recipe.frozen):
            parameter.requires_grad_(False)
    if recipe.checkpointing is not None:
        where, use_reentrant = recipe.checkpointing
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        else:
            model.checkpoint_activations(where=where, use_reentrant=use_reentrant)
    return model.train()


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over the parameters that the model shows."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Iterable[Any] = parameters
    if recipe.decay_by_shape:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.2},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
        ]
    if recipe.interleaved:
        groups = [
            {"params": parameters[::2], "weight_decay": 0.2},
            {"params": parameters[1::2], "weight_decay": 0.0, "lr": 1e-3},
        ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    if recipe.optimizer == "plain sgd":
        return torch.optim.SGD(groups, lr=3e-3)
    return torch.optim.SGD(groups, lr=3e-3, momentum=0.9, weight_decay=0.01)


def train_plain(recipe: Recipe, world_size: int) -> Outcome:
    """Train in this process on the batches of ``world_size`` ranks."""
    subject, model = subject_of(recipe), prepare_model(recipe)
    if recipe.mxfp8:
        # torchao is slow to import.
        from tests.support.mxfp8_reference import run_by_reference

        run_by_reference(model)
    optimizer = make_optimizer(recipe, model)
    losses, norms = [], []
    for step in range(recipe.steps):
        totals: dict[nn.Parameter, torch.Tensor] = {}
        loss_sum = 0.0
        for rank in range(world_size):
            model.zero_grad()
            for micro in range(recipe.micro_batches):
                loss = subject.loss(model, subject.micro_batch(step, micro, rank))
                (loss / recipe.micro_batches).backward()
                loss_sum += loss.item()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    seen = totals.get(parameter)
                    totals[parameter] = parameter.grad if seen is None else seen + parameter.grad
        losses.append(loss_sum / (world_size * recipe.micro_batches))
        for parameter in model.parameters():
            parameter.grad = totals[parameter] / world_size if parameter in totals else None
        if recipe.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item())
        optimizer.step()
    return Outcome(losses, norms, {k: v.detach().clone() for k, v in model.state_dict().items()})


def shard(
    recipe: Recipe, runtime: sshsdp.RuntimePolicy | None = None
) -> tuple[nn.Module, sshsdp.Engine, torch.optim.Optimizer]:
    """The model of a recipe, sharded over this process group, and its attached optimizer.

    Args:
        recipe: What to shard and how.
        runtime: Used instead of the recipe's own policy.
    """
    model = prepare_model(recipe)
    policy = runtime or recipe.runtime_policy
    if recipe.packs:
        policy = replace(policy, packs=sshsdp.find_packs(model))
    mesh = recipe.mesh and dist.init_device_mesh(
        "cpu", recipe.mesh, mesh_dim_names=("replicate", "shard")
    )
    engine = sshsdp.shard(
        model,
        mesh=mesh,
        units=subject_of(recipe).units,
        runtime=policy,
        update=recipe.update_policy,
    )
    return model, engine, engine.attach(make_optimizer(recipe, model))


def train_sshsdp(recipe: Recipe, runtime: sshsdp.RuntimePolicy | None = None) -> Outcome:
    """Train on this process group's ranks with `sshsdp`; weights come back on rank 0."""
    model, engine, optimizer = shard(recipe, runtime)
    losses, norms = [], []
    for step in range(recipe.steps):
        losses.append(_accumulate(recipe, model, step, engine.no_sync))
        if recipe.clip is not None:
            norms.append(engine.clip_grad_norm_(recipe.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    outcome = Outcome(losses, norms, engine.full_state_dict())
    engine.close()
    return outcome


def train_fsdp2(recipe: Recipe) -> Outcome:
    """Train on this process group's ranks with FSDP2; weights come back on rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = prepare_model(recipe)
    reduce_dtype = update_dtypes(recipe.dtype)["reduce_dtype"]
    policy = MixedPrecisionPolicy(param_dtype=recipe.dtype, reduce_dtype=reduce_dtype)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    units = unit_modules(model, subject_of(recipe).units)
    for module in [*reversed(units), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=recipe.reshard)
    optimizer = make_optimizer(recipe, model)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    losses, norms = [], []
    for step in range(recipe.steps):
        losses.append(_accumulate(recipe, model, step, no_sync))
        if recipe.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return Outcome(losses, norms, get_model_state_dict(model, options=options))


def unit_modules(model: nn.Module, patterns: tuple[str, ...] | None) -> list[nn.Module]:
    """The modules that a subject's ``units`` name."""
    if patterns is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return [child for module in lists for child in module]
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _accumulate(recipe: Recipe, model: nn.Module, step: int, no_sync: Any) -> float:
    """Forward and backward of one step; returns the loss averaged over ranks and micro-batches."""
    subject, rank = subject_of(recipe), dist.get_rank()
    loss_sum = torch.zeros((), dtype=torch.float64)
    for micro in range(recipe.micro_batches):
        defers = recipe.defer_reduction and micro + 1 < recipe.micro_batches
        with no_sync() if defers else contextlib.nullcontext():
            loss = subject.loss(model, subject.micro_batch(step, micro, rank))
            (loss / recipe.micro_batches).backward()
        loss_sum += loss.item()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / (dist.get_world_size() * recipe.micro_batches)
