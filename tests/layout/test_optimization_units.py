"""Parameters cut into the matrices that optimizers work on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sshsdp import Split
from sshsdp.assembly.discovery import collect_slots
from sshsdp.assembly.splits import resolve_splits
from sshsdp.layout.optimization_units import optimization_units


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Split]:
    """A shape and a split that suits it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    per_index = draw(st.booleans())
    inner = shape[1:] if per_index else shape
    dim = draw(st.integers(0, len(inner) - 1))
    extent = inner[dim]
    cuts = sorted(draw(st.sets(st.integers(1, extent - 1)))) if extent > 1 else []
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True))
    split = draw(st.sampled_from([Split.sizes(*sizes, dim=dim), Split.equal(extent, dim=dim)]))
    if per_index:
        split = Split.experts(split)
    return shape, split


@given(cases())
def test_units_cover_a_parameter_once(case: tuple[tuple[int, ...], Split]) -> None:
    shape, split = case
    values = torch.arange(math.prod(shape)).reshape(shape)
    units = optimization_units("w", shape, split)
    seen = torch.cat([unit.of(values).reshape(-1) for unit in units])
    assert sorted(seen.tolist()) == list(range(math.prod(shape)))
    assert sum(unit.numel for unit in units) == math.prod(shape)
    assert len({unit.name for unit in units}) == len(units)
    assert all(math.prod(unit.shape) == unit.numel for unit in units)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split.sizes(2, 3), r"'w' of shape \(6, 4\): the parts \(2, 3\) add up to 5.*has 6"),
        (Split.equal(4), r"'w' of shape \(6, 4\): dim 0 of 6 does not divide into 4"),
        (Split.equal(2, dim=2), "too few dims"),
        (Split.experts(Split.equal(2, dim=1)), "too few dims"),
    ],
)
def test_parts_that_do_not_fit_are_refused(split: Split, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimization_units("w", (6, 4), split)


def test_impossible_splits_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Split.sizes(3, 0)
    with pytest.raises(ValueError, match="2 parts has the names"):
        Split.equal(2, names=("gate",))


def units_of(
    model: nn.Module, splits: dict[str, Split] | None = None
) -> dict[str, tuple[int, ...]]:
    """Name to shape, as the optimizer sees the model's parameters."""
    resolved = resolve_splits(splits or {}, model, collect_slots(model))
    return {unit.name: unit.shape for units in resolved.values() for unit in units}


def test_heads_of_a_projection_are_units_if_the_user_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 3))
    found = units_of(model, {"0.weight": Split.equal(3)})
    assert found == {
        "0.weight[0]": (4, 8),
        "0.weight[1]": (4, 8),
        "0.weight[2]": (4, 8),
        "0.bias": (12,),
        "1.weight": (3, 12),
        "1.bias": (3,),
    }


def test_convolutions_are_seen_as_matrices_and_attention_by_projection() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 5, 2), "attention": nn.MultiheadAttention(4, 2)})
    found = units_of(model)
    assert found["conv.weight"] == (5, 12)
    assert {found[f"attention.in_proj_weight[{part}]"] for part in "qkv"} == {(4, 4)}
    assert found["attention.out_proj.weight"] == (4, 4)


def test_fused_projections_of_known_families_are_their_parts() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "pad_token_id": 0,
    }
    with torch.device("meta"):
        phi3 = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes))
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=32)
        )
        moe = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **sizes, num_experts=3, moe_intermediate_size=8, head_dim=4, decoder_sparse_step=1
            )
        )
    layer = "model.layers.0"
    found = units_of(phi3)
    assert found[f"{layer}.self_attn.qkv_proj.weight[q]"] == (16, 16)
    assert found[f"{layer}.self_attn.qkv_proj.weight[v]"] == (8, 16)
    assert found[f"{layer}.mlp.gate_up_proj.weight[up]"] == (24, 16)
    assert units_of(gpt2)["transformer.h.0.attn.c_attn.weight[k]"] == (16, 16)
    found = units_of(moe)
    assert found[f"{layer}.mlp.experts.gate_up_proj[2][gate]"] == (8, 16)
    assert found[f"{layer}.mlp.experts.down_proj[0]"] == (16, 8)


def test_a_wildcard_leaves_whole_what_it_cannot_cut_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 3))
    found = units_of(model, {"*.weight": Split.equal(4)})
    assert "0.weight[3]" in found
    assert "1.weight" in found
    assert "leaves '1.weight' whole" in caplog.text


def test_a_parameter_named_exactly_must_take_its_split() -> None:
    model = nn.Sequential(nn.Linear(8, 12))
    with pytest.raises(ValueError, match=r"splits: parameter '0\.weight'.*add up to 5"):
        units_of(model, {"0.weight": Split.sizes(2, 3)})
    with pytest.raises(ValueError, match=r"splits: the pattern '9\.weight' matches no name"):
        units_of(model, {"9.weight": Split.equal(2)})


def test_a_tied_parameter_is_not_cut_in_two_ways() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    with pytest.raises(ValueError, match=r"'a\.weight' is cut in different ways.*'b\.weight'"):
        units_of(model, {"a.weight": Split.equal(2), "b.weight": Split.equal(4)})
    assert "a.weight[1]" in units_of(model, {"b.weight": Split.equal(2)})
