"""Accumulation and clipping over sharded gradients."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from accelerate_sshsdp.optimizers import unwrap_optimizer
from accelerate_sshsdp.sharding import engine_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import sshsdp

__all__ = ["GradientsMixin"]


class GradientsMixin:
    """The gradient methods of `Accelerator`; Accelerate's class comes after it in the bases."""

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate the gradients of a model without reducing them."""
        engine = engine_of(model)
        if engine is None:
            with super().no_sync(model):
                yield
            return
        with engine.no_sync():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Reduce in the next backward, though its forwards ran under `no_sync`."""
        engine = engine_of(model)
        with contextlib.nullcontext() if engine is None else engine.no_sync(enabled=False):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Refuse uneven inputs: every rank must take part in every gather.

        Raises:
            ValueError: ``even_batches`` is off.
        """
        if not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "join_uneven_inputs: with sharded models a rank without a batch would leave the "
                "others waiting for its shards: keep even_batches=True, or drop_last=True in the "
                "dataloader"
            )
        yield

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor | None:
        """Clip the norm of all gradients together. Collective.

        Args:
            parameters: All parameters of one or more prepared models, or all of an optimizer.
            max_norm: The norm to clip to.
            norm_type: Which norm.

        Returns:
            The norm before clipping, a plain tensor that is the same on all ranks; None while
            gradients are being accumulated.

        Raises:
            ValueError: ``parameters`` are only a part of what an optimizer trains.
        """
        parameters = _listed(parameters)
        chosen = self._chosen(parameters, "clip_grad_norm_")
        if not chosen:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if not self.sync_gradients:
            return None
        self.unscale_gradients([one for _, optimizers in chosen for one in optimizers])
        if len(chosen) == 1 and len(chosen[0][1]) == len(chosen[0][0].optimizers):
            return chosen[0][0].clip_grad_norm_(max_norm, norm_type)
        norms = [
            engine.clip_grad_norm_(float("inf"), norm_type, optimizer=optimizer)
            for engine, optimizers in chosen
            for optimizer in optimizers
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for _, optimizers in chosen:
            clip_grads_with_norm_(_update_tensors(optimizers), max_norm, norm)
        return norm

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip every gradient element to ``[-clip_value, clip_value]``.

        Args:
            parameters: As for `clip_grad_norm_`.
            clip_value: The bound.
        """
        parameters = _listed(parameters)
        chosen = self._chosen(parameters, "clip_grad_value_")
        if not chosen:
            super().clip_grad_value_(parameters, clip_value)
        elif self.sync_gradients:
            optimizers = [one for _, its in chosen for one in its]
            self.unscale_gradients(optimizers)
            torch.nn.utils.clip_grad_value_(_update_tensors(optimizers), clip_value)

    def _chosen(
        self, parameters: list[torch.Tensor], caller: str
    ) -> list[tuple[sshsdp.Engine, list[torch.optim.Optimizer]]]:
        """The engines and optimizers that train ``parameters``; empty if no engine does."""
        given = {*parameters}
        chosen = []
        for engine in self.engines:
            trained = {
                optimizer: {
                    p for group in engine.parameters_of(optimizer) for p in group if p.requires_grad
                }
                for optimizer in engine.optimizers
            }
            held = {o: {*_update_tensors([o])} for o in engine.optimizers}
            optimizers = [o for o in trained if trained[o] & given or held[o] & given]
            for one in optimizers:
                if not (trained[one] <= given or held[one] <= given):
                    raise ValueError(
                        f"{caller} must be given all parameters of the model, or all that an "
                        f"optimizer trains, got a part of those of {type(one).__name__}: a part "
                        "has no gradients of its own here, as those of a unit lie in one buffer"
                    )
            if not optimizers and any(slot.parameter in given for slot in engine.slots):
                raise RuntimeError(
                    f"{caller}: no optimizer of {type(engine.model).__name__} has been prepared, "
                    "so it has no gradients to clip"
                )
            if optimizers:
                chosen.append((engine, optimizers))
        return chosen


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]


def _update_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [
        tensor
        for one in optimizers
        for group in unwrap_optimizer(one).param_groups
        for tensor in group["params"]
    ]
