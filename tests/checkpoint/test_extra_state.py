"""What modules keep beside parameters and buffers is saved and loaded as torch and FSDP2 do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATES = {
    "number": 7,
    "text": "seven",
    "tensor": torch.arange(5.0),
    "dict": {"scale": torch.tensor([2.0, 3.0]), "history": [1, 2], "inner": {"name": "a"}},
    "list": [torch.ones(2), {"x": 1}],
    "empty": {},
}


class Keeps(nn.Module):
    """A layer with an extra state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def make_model(state: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": Keeps(state), "second": Keeps({"always": 1})})


def assert_equal(found: Any, expected: Any) -> None:
    # Small tensors are written out whole.
    assert repr(found) == repr(expected)


def save_and_load(path: Path, kind: str) -> None:
    """Through a checkpoint, and through a whole state dict, into a model that has another state."""
    engine = sshsdp.shard(make_model(STATES[kind]))
    engine.save(path)
    whole = engine.full_state_dict()
    if dist.get_rank() == 0:
        assert list(whole) == list(make_model(0).state_dict())
        assert_equal(whole["first._extra_state"], STATES[kind])
    before = {} if kind == "empty" else [torch.zeros(9)]
    for load in (
        lambda other: other.load(path),
        lambda other: other.load_full_state_dict(whole),
    ):
        model = make_model(before)
        load(sshsdp.shard(model))
        assert_equal(model["first"].state, STATES[kind])
        assert model["second"].state == {"always": 1}
    assert_equal(sshsdp.read_checkpoint(path).get("first._extra_state", {}), STATES[kind])


@pytest.mark.parametrize("kind", STATES)
def test_extra_states_come_back(tmp_path: Path, workers: Callable[[int], Any], kind: str) -> None:
    workers(2).run(save_and_load, tmp_path / "checkpoint", kind)


def fsdp2(state: Any) -> nn.Module:
    model = make_model(state)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.values():
        fully_shard(layer, mesh=mesh)
    return model


def exchange(folder: Path, kind: str) -> None:
    """From FSDP2 to here and back."""
    theirs = fsdp2(STATES[kind])
    dcp.save({"model": get_model_state_dict(theirs)}, checkpoint_id=folder / "theirs")
    model = make_model(0)
    engine = sshsdp.shard(model)
    engine.load(folder / "theirs")
    assert_equal(model["first"].state, STATES[kind])
    engine.save(folder / "ours")
    # FSDP2 reads into what the model has: of the same structure, with other values.
    blank = torch.utils._pytree.tree_map(
        lambda value: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None,
        STATES[kind],
    )
    theirs = fsdp2(blank)
    state = {"model": get_model_state_dict(theirs)}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_model_state_dict(theirs, state["model"])
    assert_equal(theirs["first"].state, STATES[kind])


@pytest.mark.parametrize("kind", ["number", "tensor", "dict"])
def test_extra_states_are_exchanged_with_fsdp2(
    tmp_path: Path, workers: Callable[[int], Any], kind: str
) -> None:
    workers(2).run(exchange, tmp_path, kind)


class Plain(nn.Module):
    """The same layer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)


def names_differ(folder: Path) -> None:
    """Extra states that only one side has."""
    keeps = sshsdp.shard(nn.ModuleDict({"first": Keeps({"a": 1, "b": 2})}))
    plain = sshsdp.shard(nn.ModuleDict({"first": Plain()}))
    keeps.save(folder / "keeps")
    plain.save(folder / "plain")
    name = "first._extra_state"
    with pytest.raises(ValueError, match=rf"unexpected in the checkpoint: {name}$"):
        plain.load(folder / "keeps")
    with pytest.raises(ValueError, match=rf"missing in the checkpoint: {name}$"):
        keeps.load(folder / "plain")
    assert plain.load_model_checkpoint(folder / "keeps", strict=False) == ([], [name])
    assert keeps.load_model_checkpoint(folder / "plain", strict=False) == ([name], [])
    whole_keeps, whole_plain = keeps.full_state_dict(), plain.full_state_dict()
    with pytest.raises(RuntimeError, match=f"unexpected: {name}"):
        plain.load_full_state_dict(whole_keeps)
    with pytest.raises(RuntimeError, match=f"missing: {name}"):
        keeps.load_full_state_dict(whole_plain)
    assert keeps.load_full_state_dict(whole_plain, strict=False) == ([name], [])
    assert keeps.model["first"].state == {"a": 1, "b": 2}


def test_extra_states_that_only_one_side_has_are_named(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    workers(2).run(names_differ, tmp_path)
