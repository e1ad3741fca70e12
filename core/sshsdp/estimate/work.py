"""Arithmetic and activations of a transformer, per token.

Matrix products are counted from the parameters: two operations per weight and token forward, four
backward; of routed experts, only the share that a token is sent to. Attention (causal) and
activations need the sizes that a Hugging Face config states; without one, they are left out.

Activations are what autograd keeps of a block without activation checkpointing, with fused
attention. Per token, in elements of the compute dtype, for hidden size ``h``:

* inputs and outputs of the two norms, 4 h;
* queries, keys, values and the attention's output;
* of each MLP that the token goes through: gate, up, their activation and product, 4 f;
* its copies of the input and of the output of each routed expert, 2 h per expert.

Of the head: the logits, their fp32 copy and its gradient. With checkpointing: one input per block,
and one block in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from sshsdp.assembly.discovery import ROOT, collect_slots, find_unit_modules, unit_of_slot

if TYPE_CHECKING:
    from sshsdp.assembly.discovery import UnitRule
    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["ModelWork", "TransformerDims", "model_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerDims:
    """Sizes of a decoder's blocks.

    Attributes:
        hidden: Hidden size.
        vocabulary: Vocabulary size.
        num_heads: Attention heads.
        num_kv_heads: Key and value heads.
        qk_head_dim: Elements of a query or key head.
        v_head_dim: Elements of a value head.
        intermediate: Inner size of a dense MLP.
        expert_intermediate: Inner size of an expert; 0 without experts.
        num_experts: Routed experts.
        num_active_experts: Those that a token is sent to.
        num_shared_experts: Experts that every token goes through.
    """

    hidden: int
    vocabulary: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    intermediate: int
    expert_intermediate: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    num_shared_experts: int = 0

    @classmethod
    def of(cls, config: Any) -> TransformerDims | None:
        """Read a Hugging Face config; None if it lacks a size."""
        config = getattr(config, "text_config", None) or config

        def first(*names: str, default: int | None = None) -> int | None:
            values = [getattr(config, name, None) for name in names]
            return next((v for v in values if isinstance(v, int)), default)

        hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
        vocabulary = first("vocab_size")
        if hidden is None or heads is None or vocabulary is None:
            return None
        head_dim = first("head_dim") or hidden // heads
        experts = first("moe_intermediate_size", default=0) or 0
        num_experts = first("n_routed_experts", "num_local_experts", "num_experts", default=0) or 0
        if num_experts and not experts:
            experts = first("intermediate_size") or 0
        return cls(
            hidden=hidden,
            vocabulary=vocabulary,
            num_heads=heads,
            num_kv_heads=first("num_key_value_heads") or heads,
            qk_head_dim=first("qk_head_dim") or head_dim,
            v_head_dim=first("v_head_dim") or head_dim,
            intermediate=first("intermediate_size", "n_inner") or 4 * hidden,
            expert_intermediate=experts,
            num_experts=num_experts,
            num_active_experts=first("num_experts_per_tok", "moe_top_k", default=0) or 0,
            num_shared_experts=first("n_shared_experts", default=0) or 0,
        )

    @property
    def attention_elements(self) -> int:
        """Queries, keys, values and the attention's output, per token."""
        queries = self.num_heads * (self.qk_head_dim + self.v_head_dim)
        return queries + self.num_kv_heads * (self.qk_head_dim + self.v_head_dim)

    def attention_flops(self, sequence: int) -> float:
        """Forward operations of causal attention, per token and block."""
        return sequence * self.num_heads * (self.qk_head_dim + self.v_head_dim)

    def block_elements(self, *, has_experts: bool) -> int:
        """Activations of a block, per token."""
        kept = 4 * self.hidden + self.attention_elements
        if not has_experts:
            return kept + 4 * self.intermediate
        num_mlps = self.num_active_experts + self.num_shared_experts
        routed = 2 * self.hidden * self.num_active_experts
        return kept + 4 * self.expert_intermediate * num_mlps + routed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a token costs.

    Attributes:
        matmul_weights: Weights that a token is multiplied with, by unit name.
        has_experts: Whether a unit has routed experts, by unit name.
        dims: Sizes of the blocks, if known.
    """

    matmul_weights: dict[str, float]
    has_experts: dict[str, bool]
    dims: TransformerDims | None

    def unit_flops(self, unit: str, sequence: int) -> float:
        """Forward operations of a unit, per token."""
        flops = 2 * self.matmul_weights[unit]
        if self.dims is not None and unit != ROOT:
            flops += self.dims.attention_flops(sequence)
        return flops

    def step_flops(self, sequence: int) -> float:
        """Forward and backward operations per token, recomputation not counted."""
        return 3 * sum(self.unit_flops(unit, sequence) for unit in self.matmul_weights)

    def activation_bytes(
        self, *, batch: int, sequence: int, itemsize: int, is_checkpointed: bool
    ) -> int | None:
        """Bytes kept from forward for backward; None if the sizes are not known."""
        dims = self.dims
        if dims is None:
            return None
        blocks = [
            dims.block_elements(has_experts=has_experts)
            for unit, has_experts in self.has_experts.items()
            if unit != ROOT
        ]
        elements = sum(blocks)
        if is_checkpointed:
            elements = dims.hidden * len(blocks) + max(blocks, default=0)
        head = dims.vocabulary * (itemsize + 8)
        return batch * sequence * (elements * itemsize + head)


def model_work(model: nn.Module, *, units: UnitRule = None, config: Any = None) -> ModelWork:
    """Count what a token costs.

    Args:
        model: The model; may be on meta.
        units: As in `sshsdp.shard`.
        config: Its Hugging Face config; default: ``model.config``, if there is one.
    """
    config = config if config is not None else getattr(model, "config", None)
    dims = TransformerDims.of(config) if config is not None else None
    modules = find_unit_modules(model, units)
    weights = dict.fromkeys([ROOT, *modules], 0.0)
    has_experts = dict.fromkeys([ROOT, *modules], False)
    for slot in collect_slots(model):
        unit = unit_of_slot(slot, modules)
        is_expert = _is_expert(slot)
        has_experts[unit] |= is_expert
        weights[unit] += _active_weights(slot, is_expert, dims)
    return ModelWork(matmul_weights=weights, has_experts=has_experts, dims=dims)


def _is_expert(slot: ParameterSlot) -> bool:
    return ".experts." in slot.name and len(slot.shape) > 1


def _active_weights(slot: ParameterSlot, is_expert: bool, dims: TransformerDims | None) -> float:
    """Weights of a parameter that one token is multiplied with."""
    if len(slot.shape) < 2 or all(isinstance(module, nn.Embedding) for module, _ in slot.holders):
        return 0.0
    numel = math.prod(slot.shape)
    if not is_expert or dims is None or not dims.num_active_experts:
        return float(numel)
    return numel * dims.num_active_experts / max(dims.num_experts, 1)
