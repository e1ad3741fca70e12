"""Muon for whole matrices and for matrices spread over ranks by rows, with AdamW for the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.adamw import adamw

from sshsdp.optim.gram_exchange import GramExchange, split_by_size
from sshsdp.optim.newton_schulz import COEFFICIENTS, gram_factors, orthogonalize
from sshsdp.optim.row_shards import row_shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sshsdp.comm.collectives import Collectives
    from sshsdp.layout.cuts import Granularity

__all__ = ["Method", "Muon", "choose_method"]

Method = Literal["auto", "owner", "gram"]

# Elements that are worked on at once: enough to fill a GPU, little beside the model.
_BATCH_NUMEL = 2**26

# Of a group that AdamW steps; names as in torch.optim.AdamW but for eps, which Muon has too.
_ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "adamw_eps": 1e-8}


@dataclass(frozen=True, eq=False)
class _Entry:
    """A matrix to be stepped.

    Attributes:
        weight: The weights, or this rank's rows of them.
        update: What is to be orthogonalized: of the weights' size, 2-D.
        shape: Shape of the whole matrix.
        is_cut: Whether other ranks hold rows of it too.
        axes: Over which they are spread.
    """

    weight: torch.Tensor
    update: torch.Tensor
    shape: tuple[int, ...]
    is_cut: bool = False
    axes: tuple[Collectives, ...] = ()


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon``'s rule and options, over batches of matrices, sharded or not.

    Matrices of one shape are orthogonalized together. Attached to an engine, a matrix is either
    whole on one rank (``"owner"``) or spread over all ranks by rows (``"gram"``): then only its
    Gram matrix is summed over ranks, and the iteration, in float32, runs on that, on one of them.
    Param groups with ``algorithm="adamw"`` are stepped by AdamW, element by element (see
    `sshsdp.optim.muon_with_adamw`).

    Without an engine: ``[E, m, n]`` is a batch of matrices, and more dims are flattened to
    ``[out, rest]``. With one, ``UpdatePolicy.splits`` says what a matrix is.

    Args:
        params: Parameters or param groups. A group may set any of the options below, and
            ``algorithm`` (``"muon"`` or ``"adamw"``), ``betas`` and ``adamw_eps``.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Weight of the old momentum in ``B = momentum * B + (1 - momentum) * grad``.
        nesterov: Look ahead: orthogonalize ``(1 - momentum) * grad + momentum * B``.
        ns_coefficients: ``(a, b, c)`` of the Newton-Schulz polynomial.
        eps: Least norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: ``"original"`` (or None): times ``sqrt(max(1, m / n))``;
            ``"match_rms_adamw"``: times ``0.2 * sqrt(max(m, n))``.
        ns_dtype: In which whole matrices are iterated on.
        method: ``"auto"``: for each matrix what `choose_method` says.

    Raises:
        ValueError: A value out of range; a parameter of fewer than 2 dims in a Muon group.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        method: Method = "auto",
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise ValueError(f"Muon: {name} must be 0 or more, got {value}")
        if not ns_steps >= 1:
            raise ValueError(f"Muon: ns_steps must be 1 or more, got {ns_steps}")
        if method not in ("auto", "owner", "gram"):
            raise ValueError(f"Muon: method must be 'auto', 'owner' or 'gram', got {method!r}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                "Muon: adjust_lr_fn must be None, 'original' or 'match_rms_adamw', "
                f"got {adjust_lr_fn!r}"
            )
        defaults = {
            "algorithm": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "method": method,
            **_ADAMW_DEFAULTS,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse what its algorithm cannot step."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["algorithm"] not in ("muon", "adamw"):
            self.param_groups.pop()
            raise ValueError(
                f"Muon: algorithm must be 'muon' or 'adamw', got {group['algorithm']!r}"
            )
        if group["algorithm"] == "adamw":
            return
        names = group.get("param_names", [f"number {i}" for i in range(len(group["params"]))])
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.ndim < 2 and row_shard_of(parameter) is None:
                self.param_groups.pop()
                raise ValueError(
                    f"Muon: parameter {name} of group {len(self.param_groups)} has shape "
                    f"{tuple(parameter.shape)}, which is no matrix: give it to a group with "
                    "algorithm='adamw' (sshsdp.optim.muon_with_adamw does so)"
                )

    def sshsdp_granularity(
        self, group: dict[str, Any], shapes: Sequence[tuple[int, ...]], num_ranks: int
    ) -> Granularity:
        """How finely the engine may cut a parameter of a group.

        Args:
            group: The param group.
            shapes: Shapes of the matrices that the parameter consists of.
            num_ranks: Over how many ranks updates are spread.
        """
        if group["algorithm"] == "adamw":
            return "element"
        method = group["method"]
        if method == "auto":
            choices = {choose_method(shape[-2:], num_ranks) for shape in shapes}
            method = "gram" if choices == {"gram"} else "owner"
        return "row" if method == "gram" else "matrix"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if group["algorithm"] == "adamw":
                self._step_adamw(group, tensors)
                continue
            entries = [entry for tensor in tensors for entry in self._entries(group, tensor)]
            self._step_whole(group, [entry for entry in entries if not entry.is_cut])
            self._step_by_gram(group, [entry for entry in entries if entry.is_cut])
        return loss

    def _momentum(self, group: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        """What is to be orthogonalized: the momentum, looking ahead or not."""
        assert tensor.grad is not None
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(tensor.grad)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(tensor.grad, 1 - group["momentum"])
        return tensor.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _entries(self, group: dict[str, Any], tensor: torch.Tensor) -> list[_Entry]:
        update, weight, shard = self._momentum(group, tensor), tensor.detach(), row_shard_of(tensor)
        if shard is not None:
            return [
                _Entry(part, rows, matrix.shape, is_cut=matrix.is_cut, axes=shard.axes)
                for part, rows, matrix in zip(
                    shard.views(weight), shard.views(update), shard.matrices, strict=True
                )
                # What is whole on another rank is its business.
                if matrix.is_cut or rows.numel()
            ]
        if tensor.ndim == 3:
            pairs = zip(weight.unbind(0), update.unbind(0), strict=True)
            return [_Entry(part, one, tuple(one.shape)) for part, one in pairs]
        matrix = update.flatten(1)
        return [_Entry(weight, matrix, tuple(matrix.shape))]

    def _step_whole(self, group: dict[str, Any], entries: Iterable[_Entry]) -> None:
        batches: dict[Any, list[_Entry]] = defaultdict(list)
        for entry in entries:
            weight = entry.weight
            batches[*entry.update.shape, weight.dtype, weight.device].append(entry)
        for alike in batches.values():
            num_at_once = max(_BATCH_NUMEL // max(alike[0].update.numel(), 1), 1)
            for first in range(0, len(alike), num_at_once):
                chunk = alike[first : first + num_at_once]
                made = orthogonalize(
                    torch.stack([entry.update for entry in chunk]),
                    coefficients=group["ns_coefficients"],
                    num_steps=group["ns_steps"],
                    eps=group["eps"],
                    dtype=group["ns_dtype"],
                )
                for entry, direction in zip(chunk, made, strict=True):
                    _apply(group, entry, direction)

    def _step_by_gram(self, group: dict[str, Any], entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        sizes = [min(entry.shape[-2:]) ** 2 for entry in entries]
        # Every rank is to have something to iterate on.
        limit = max(_BATCH_NUMEL, max(sizes) * math.prod(axis.size for axis in entries[0].axes))
        exchanges: list[tuple[Sequence[_Entry], GramExchange]] = []
        for chunk in split_by_size(entries, sizes, limit):
            updates = [_widened(entry.update) for entry in chunk]
            grams = [update.mT @ update for update in updates]
            exchanges.append((chunk, GramExchange(grams, chunk[0].axes)))
            # The next sums are on their way while the last factors are computed.
            if len(exchanges) > 1:
                self._finish_by_gram(group, *exchanges.pop(0))
        for exchange in exchanges:
            self._finish_by_gram(group, *exchange)

    def _finish_by_gram(
        self, group: dict[str, Any], entries: Sequence[_Entry], exchange: GramExchange
    ) -> None:
        factors = exchange.factors(
            partial(
                gram_factors,
                coefficients=group["ns_coefficients"],
                num_steps=group["ns_steps"],
                eps=group["eps"],
            )
        )
        for entry, factor in zip(entries, factors, strict=True):
            _apply(group, entry, _widened(entry.update) @ factor)

    def _step_adamw(self, group: dict[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        states = [self.state[tensor] for tensor in tensors]
        for tensor, state in zip(tensors, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
        beta1, beta2 = group["betas"]
        adamw(
            list(tensors),
            [tensor.grad for tensor in tensors if tensor.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _widened(update: torch.Tensor) -> torch.Tensor:
    return update.to(torch.promote_types(update.dtype, torch.float32))


def _apply(group: dict[str, Any], entry: _Entry, direction: torch.Tensor) -> None:
    lr, weight = float(group["lr"]), entry.weight
    height, width = entry.shape[-2:]
    ratio = (
        0.2 * math.sqrt(max(height, width))
        if group["adjust_lr_fn"] == "match_rms_adamw"
        else math.sqrt(max(1, height / width))
    )
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(direction.to(weight.dtype).reshape(weight.shape), alpha=-lr * ratio)


def choose_method(shape: Sequence[int], num_ranks: int) -> Literal["owner", "gram"]:
    """Which way brings less over the wire to every rank, for one matrix among many.

    Owner: the float32 gradient to the owner and bfloat16 values back, 6 bytes for every element,
    shared by all ranks. Gram: ``n^2`` float32 numbers (``n`` the short side) scattered as sums, and
    as many factors gathered, 8 bytes for each, on every rank.

    Args:
        shape: ``(m, n)`` of the matrix.
        num_ranks: Over how many ranks updates are spread.
    """
    height, width = shape
    owner = 6 * height * width / num_ranks
    gram = 8 * min(height, width) ** 2
    return "gram" if gram < owner else "owner"
