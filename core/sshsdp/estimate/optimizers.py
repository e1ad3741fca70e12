"""What optimizers keep for each parameter, and how finely their work may be cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sshsdp.layout.cuts import Cuts, blocks, elements

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPTIMIZERS", "OptimizerCost", "optimizer_cost"]

Shape = tuple[int, ...]

# torchao quantizes the state of a parameter only from this size on.
_LEAST_QUANTIZED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Memory and demands of an optimizer.

    Attributes:
        name: What ``--optimizer`` takes.
        granularity: Which piece it must see whole.
        state_nbytes: ``(shape, bytes per master element, is hidden matrix)`` to bytes of state.
        cuts: Shape to where shards may cut.
        needs_whole: ``(shape, is hidden matrix)`` to whether owners update it as whole matrices.
        flops: ``(shape, is hidden matrix)`` to matrix operations of an update.
    """

    name: str
    granularity: Literal["element", "block", "matrix"]
    state_nbytes: Callable[[Shape, int, bool], float]
    cuts: Callable[[Shape], Cuts]
    needs_whole: Callable[[Shape, bool], bool] = lambda shape, is_hidden: False
    flops: Callable[[Shape, bool], float] = lambda shape, is_hidden: 0.0


def _per_element(name: str, count: int) -> OptimizerCost:
    return OptimizerCost(
        name=name,
        granularity="element",
        state_nbytes=lambda shape, itemsize, is_hidden: count * itemsize * math.prod(shape),
        cuts=lambda shape: elements(),
    )


def _low_bit(name: str, bits: int, block: int) -> OptimizerCost:
    def is_quantized(shape: Shape) -> bool:
        numel = math.prod(shape)
        return numel >= _LEAST_QUANTIZED and numel % block == 0

    def state(shape: Shape, itemsize: int, is_hidden: bool) -> float:
        numel = math.prod(shape)
        if not is_quantized(shape):
            return 2 * itemsize * numel
        # Two moments, each with one fp32 scale per block.
        return 2 * numel * (bits / 8 + 4 / block)

    return OptimizerCost(
        name=name,
        granularity="block",
        state_nbytes=state,
        cuts=lambda shape: blocks(block) if is_quantized(shape) else elements(),
    )


def _muon_state(shape: Shape, itemsize: int, is_hidden: bool) -> float:
    # Momentum for hidden matrices; AdamW's two moments for embeddings, head, norms and biases.
    return (1 if _is_matrix(shape, is_hidden) else 2) * itemsize * math.prod(shape)


def _is_matrix(shape: Shape, is_hidden: bool) -> bool:
    return is_hidden and len(shape) > 1


def _muon_flops(shape: Shape, is_hidden: bool) -> float:
    """Five Newton-Schulz iterations of three products (https://kellerjordan.github.io/posts/muon)."""
    if not _is_matrix(shape, is_hidden):
        return 0.0
    # [E, m, n] is a batch of matrices; a convolution is seen as [out, rest].
    batch, matrix = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
    short, long = sorted((matrix[0], math.prod(matrix[1:])))
    return batch * 5 * (4 * short**2 * long + 2 * short**3)


def _adafactor_state(shape: Shape, itemsize: int, is_hidden: bool) -> float:
    if len(shape) < 2:
        return itemsize * math.prod(shape)
    *batch, height, width = shape
    return itemsize * math.prod(batch) * (height + width)


OPTIMIZERS: dict[str, OptimizerCost] = {
    cost.name: cost
    for cost in (
        _per_element("adamw", 2),
        _per_element("sgd", 0),
        _per_element("sgd-momentum", 1),
        _per_element("lion", 1),
        _per_element("adagrad", 1),
        _per_element("rmsprop", 1),
        _low_bit("adamw8bit", 8, 256),
        _low_bit("adamw4bit", 4, 128),
        OptimizerCost(
            name="muon",
            granularity="matrix",
            state_nbytes=_muon_state,
            cuts=lambda shape: elements(),
            needs_whole=_is_matrix,
            flops=_muon_flops,
        ),
        OptimizerCost(
            name="adafactor",
            granularity="matrix",
            state_nbytes=_adafactor_state,
            cuts=lambda shape: elements(),
            needs_whole=lambda shape, is_hidden: True,
        ),
    )
}


def optimizer_cost(name: str) -> OptimizerCost:
    """Look an optimizer up by name.

    Raises:
        ValueError: Unknown; the message lists the known ones.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
