"""The plugin's fields: arguments, environment, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from accelerate_sshsdp import SSHSDPPlugin, engine_of
from accelerate_sshsdp.settings import SETTINGS
from tests.accelerate.models import llama
from tests.accelerate.training import new_accelerator

if TYPE_CHECKING:
    from tests.accelerate.conftest import Ranks

# Of every field: a value in Python, the same as text, and what the plugin holds.
VALUES: dict[str, tuple[Any, str, Any]] = {
    "units": (["Block", "head*"], "Block, head*", ["Block", "head*"]),
    "replicate_size": (2, "2", 2),
    "shard_size": ("auto", "auto", None),
    "update_sharding": ("replicated", "replicated", "replicated"),
    "reshard_after_forward": (False, "false", False),
    "prefetch": (0, "0", 0),
    "packs": (True, "True", True),
    "runtime_dtype": (torch.bfloat16, "bfloat16", torch.bfloat16),
    "runtime_format": ("mxfp8", "MXFP8", "mxfp8"),
    "update_dtype": ("torch.float32", "float32", torch.float32),
    "reduce_dtype": ("auto", "auto", None),
    "formats": (
        {"*norm*": "float32", "head": torch.float64},
        "*norm*=float32, head=float64",
        {"*norm*": torch.float32, "head": torch.float64},
    ),
    "offload": (True, "yes", True),
    "activation_checkpointing": (True, "1", True),
}
WRONG: dict[str, tuple[Any, str]] = {
    "units": ([3], "must hold module classes, names of classes and name patterns"),
    "replicate_size": (0, "must be 'auto' or a whole number of 1 or more"),
    "shard_size": ("many", "must be 'auto' or a whole number of 1 or more"),
    "update_sharding": ("sharded", "must be 'hierarchical' or 'replicated'"),
    "reshard_after_forward": ("FULL_SHARD", "must be true or false"),
    "prefetch": (-1, "must be a whole number of 0 or more"),
    "packs": ("all", "must be true or false"),
    "runtime_dtype": ("mxfp8", "must be one of float64, float32, bfloat16, float16, or 'auto'"),
    "runtime_format": ("fp8", "must be 'mxfp8' or 'auto'"),
    "update_dtype": ("int8", "must be one of float64"),
    "reduce_dtype": ("bf16", "must be one of float64"),
    "formats": ("*norm*", "must be one of float64, float32, bfloat16, float16"),
    "offload": ("disk", "must be true or false"),
    "activation_checkpointing": (2, "must be true or false"),
}


def test_every_field_is_documented_with_its_environment_variable() -> None:
    names = [field.name for field in dataclasses.fields(SSHSDPPlugin)]
    assert names == [*SETTINGS] == [*VALUES] == [*WRONG]
    for name in names:
        assert f"{name} (``{SETTINGS[name].variable}``)" in SSHSDPPlugin.__doc__
    for field in dataclasses.fields(SSHSDPPlugin):
        assert field.metadata["help"]
    docs = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text(encoding="utf-8")
    for name, setting in SETTINGS.items():
        assert f"| `{name}` | `{setting.variable}` | `{setting.key}` |" in docs


@pytest.mark.parametrize("name", VALUES)
def test_a_field_is_read_from_an_argument_or_the_environment(name: str) -> None:
    given, text, held = VALUES[name]
    assert getattr(SSHSDPPlugin(**{name: given}), name) == held
    with patch.dict(os.environ, {SETTINGS[name].variable: text}):
        assert getattr(SSHSDPPlugin(), name) == held
        default = SETTINGS[name].default
        if default is not None and default != held and name != "formats":
            # What the program says comes first.
            assert getattr(SSHSDPPlugin(**{name: default}), name) == default


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_the_names_of_field_and_source(name: str) -> None:
    value, words = WRONG[name]
    with pytest.raises(ValueError, match=f"SSHSDPPlugin: {name} {words}.*, got "):
        SSHSDPPlugin(**{name: value})
    variable = SETTINGS[name].variable
    if name != "units":
        with (
            patch.dict(os.environ, {variable: str(value)}),
            pytest.raises(ValueError, match=f"{variable}: {name} {words}"),
        ):
            SSHSDPPlugin()


@pytest.mark.parametrize(
    ("replicate", "shard", "per_machine", "sizes"),
    [
        (None, None, "4", (2, 4)),
        (None, None, "8", (1, 8)),
        (None, None, "3", (1, 8)),
        (4, None, "8", (4, 2)),
        (None, 2, "8", (4, 2)),
        (8, 1, "8", (8, 1)),
    ],
)
def test_mesh_sizes_make_up_the_world(
    replicate: int | None, shard: int | None, per_machine: str, sizes: tuple[int, int]
) -> None:
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": per_machine}):
        plugin = SSHSDPPlugin(replicate_size=replicate, shard_size=shard)
        assert plugin.mesh_sizes(8) == sizes


def _policies() -> None:
    plugin = SSHSDPPlugin(
        units=["LlamaMLP", "*.self_attn"],
        shard_size=1,
        update_sharding="replicated",
        reshard_after_forward=False,
        prefetch=3,
        packs=True,
        update_dtype="float64",
        reduce_dtype="bfloat16",
        formats="*norm*=float32",
    )
    accelerator = new_accelerator("ours", sshsdp_plugin=plugin, mixed_precision="bf16")
    model = accelerator.prepare(llama())
    engine = engine_of(model)
    names = [unit.name for unit in engine.units]
    layers = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")]
    assert names == ["<root>", *layers]
    assert accelerator.sshsdp_mesh.shape == (2, 1)
    assert (engine.runtime.reshard_after_forward, engine.runtime.prefetch) == (False, 3)
    assert len(engine.runtime.packs) == 2
    assert engine.update.sharding == "replicated"
    spaces = [space for unit in engine.units for space in unit.spaces]
    assert {space.update_dtype for space in spaces} == {torch.float64}
    assert {space.reduce_dtype for space in spaces} == {torch.bfloat16}
    runtime = {slot.name: slot.space.runtime_dtype for slot in engine.slots}
    assert runtime["model.norm.weight"] == torch.float32
    assert runtime["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16

    # A callable chooses, and what a model wants in fp32 stays in it.
    chosen = SSHSDPPlugin(units=lambda name, module: name.endswith("layers.1"))
    accelerator = new_accelerator("ours", sshsdp_plugin=chosen, mixed_precision="bf16")
    model = llama()
    model._keep_in_fp32_modules_strict = ["lm_head", "layers.0.mlp"]
    engine = engine_of(accelerator.prepare(model))
    assert [unit.name for unit in engine.units] == ["<root>", "model.layers.1"]
    runtime = {slot.name: slot.space.runtime_dtype for slot in engine.slots}
    assert runtime["model.layers.0.mlp.up_proj.weight"] == torch.float32
    # The tied name counts.
    assert runtime["model.embed_tokens.weight"] == torch.float32
    assert runtime["model.layers.1.mlp.up_proj.weight"] == torch.bfloat16


def test_fields_reach_the_engine(two_ranks: Ranks) -> None:
    two_ranks.run(_policies)


def _offload() -> None:
    accelerator = new_accelerator("ours", sshsdp_plugin=SSHSDPPlugin(offload=True))
    engine = engine_of(accelerator.prepare(nn.Linear(2, 2)))
    assert engine.update.device == "cpu"


def test_offloading_keeps_updates_on_the_host(one_rank: Ranks) -> None:
    one_rank.run(_offload)
