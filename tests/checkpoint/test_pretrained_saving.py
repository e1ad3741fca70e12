"""What is saved from shards is what transformers loads, and a failed save takes nothing away."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sshsdp
from sshsdp import pretrained_saving
from tests.checkpoint.test_pretrained import FP32, MODELS, assert_equal, step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = 6000


def trained(kind: str) -> tuple[Any, sshsdp.Engine]:
    """On shards, with masters that are not the runtime's bf16 values."""
    torch.manual_seed(3)
    cls, config = MODELS[kind]
    model = cls(config)
    engine = sshsdp.shard(model)
    step(model, engine)
    return model, engine


def save_and_load(folder: Path, kind: str, limit: int) -> None:
    model, engine = trained(kind)
    sshsdp.save_pretrained(engine, folder, max_file_bytes=limit)
    expected = engine.full_state_dict(rank0_only=False)
    plain, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert plain.config.dtype == torch.float32
    assert plain.config.architectures == [type(model).__name__]
    state = plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], value), name
    again, its_engine = sshsdp.from_pretrained(type(model), folder, runtime=FP32)
    assert_equal(again, its_engine, plain)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("limit", [10**9, LIMIT])
def test_transformers_loads_the_masters(
    workers: Callable[[int], Any], tmp_path: Path, kind: str, limit: int
) -> None:
    folder = tmp_path / "saved"
    workers(2).run(save_and_load, folder, kind, limit)
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (limit == LIMIT) == (len(files) > 1)
    keys: list[str] = []
    for path in files:
        tensors = load_file(path)
        size = sum(value.nbytes for value in tensors.values())
        assert size <= limit or len(tensors) == 1
        keys += tensors
    # Tied ones once: as many as distinct parameters.
    names = [name for name, _ in MODELS[kind][0](MODELS[kind][1]).named_parameters()]
    assert sorted(keys) == sorted(names)
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"].values()) == {f.name for f in files}


def save_bf16(folder: Path) -> None:
    model, engine = trained("llama")
    sshsdp.save_pretrained(engine, folder, dtype=torch.bfloat16)
    plain = type(model).from_pretrained(folder)
    masters = engine.full_state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, masters[name].bfloat16()), name


def test_a_narrower_dtype_is_written(workers: Callable[[int], Any], tmp_path: Path) -> None:
    workers(2).run(save_bf16, tmp_path / "saved")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fail_then_save(folder: Path) -> None:
    _, engine = trained("llama")
    sshsdp.save_pretrained(engine, folder, max_file_bytes=LIMIT)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "logs" / "deep").mkdir(parents=True)
        (folder / "logs" / "deep" / "events").write_text("x")
    dist.barrier()
    before = contents(folder)
    dist.barrier()
    calls = 0

    def full_disk(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("no space left on device")
        save_file(*args, **options)

    pretrained_saving.save_file = full_disk
    try:
        with pytest.raises((RuntimeError, OSError), match="no space left"):
            sshsdp.save_pretrained(engine, folder, max_file_bytes=LIMIT)
    finally:
        pretrained_saving.save_file = save_file
    # Rank 0 clears up once all know of the failure, and the others do not wait for that.
    dist.barrier()
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    # No rank may begin the next save while another still looks.
    dist.barrier()
    sshsdp.save_pretrained(engine, folder)
    names = set(contents(folder))
    assert {"model.safetensors", "tokenizer.json", "logs/deep/events"} <= names
    assert not any("-of-" in name or "index" in name for name in names)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_failed_save_leaves_the_last_one_and_a_good_one_leaves_other_files(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    workers(2).run(fail_then_save, tmp_path / "saved")


def refuse(folder: Path) -> None:
    _, engine = trained("llama")
    with pytest.raises(ValueError, match="max_file_bytes is 0"):
        sshsdp.save_pretrained(engine, folder, max_file_bytes=0)
    assert not folder.exists()


def test_a_limit_of_nothing_is_refused(workers: Callable[[int], Any], tmp_path: Path) -> None:
    workers(2).run(refuse, tmp_path / "saved")
