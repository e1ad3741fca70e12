"""transformers' Trainer with the mixin: training equals the stock Trainer's under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from accelerate_sshsdp.hf import SSHSDPTrainer
from tests.accelerate.models import make
from tests.accelerate.trainers import arguments, history, trainer

if TYPE_CHECKING:
    from tests.accelerate.conftest import Ranks


def _assert_trains_like_ddp(
    folder: Path, kind: str, changes: dict[str, Any], tolerance: float = 1e-5
) -> None:
    theirs = trainer("ddp", folder, kind, **changes)
    theirs.train()
    ours = trainer("ours", folder, kind, **changes)
    ours.train()
    for keys in (("loss",), ("eval_loss", "train_loss")):
        assert history(ours, *keys) == pytest.approx(history(theirs, *keys), rel=tolerance)
    assert history(ours, "grad_norm") == pytest.approx(history(theirs, "grad_norm"), rel=1e-4)
    assert history(ours, "learning_rate") == history(theirs, "learning_rate")
    assert len({*history(ours, "loss")}) > 3
    weights = ours.accelerator.get_state_dict(ours.model)
    for name, value in weights.items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_losses_norms_rates_and_weights_equal_ddp(
    two_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Accumulation, clipping, decay groups, warm-up, evaluation, an uneven last batch."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "include_num_input_tokens_seen": "all"}
    two_ranks.run(_assert_trains_like_ddp, tmp_path, kind, evaluation)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True, "max_grad_norm": 0.0},
        {"optim": "adafactor", "lr_scheduler_type": "cosine"},
        {"optim": "sgd", "learning_rate": 0.3, "lr_scheduler_type": "constant"},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 1},
    ],
    ids=lambda changes: "{}={}".format(*next(iter(changes.items()))),
)
def test_choices_equal_ddp(two_ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    two_ranks.run(_assert_trains_like_ddp, tmp_path, "llama", changes)


def _run(folder: Path, side: str, resume: str | bool | None = None, **changes: Any) -> Any:
    fields = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    one = trainer(side, folder, **{**fields, **changes})
    one.train(resume_from_checkpoint=resume)
    return one


def _weights(of: Any) -> dict[str, torch.Tensor]:
    state = of.accelerator.get_state_dict(of.model)
    return {name: value.clone() for name, value in state.items()}


def _resumes(folder: Path) -> None:
    straight = _run(folder / "ours", "ours")
    expected = _weights(straight)
    resumed = _run(folder / "ours", "ours", resume=str(folder / "ours/checkpoint-4"))
    assert resumed.state.global_step == straight.state.global_step == 6
    torch.testing.assert_close(_weights(resumed), expected, rtol=0, atol=0)
    # A second training of the same trainer finds its model sharded.
    straight.train(resume_from_checkpoint=str(folder / "ours/checkpoint-2"))
    torch.testing.assert_close(_weights(straight), expected, rtol=0, atol=0)


def test_resuming_changes_no_bit(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_resumes, tmp_path)


def _resumes_in_bf16(folder: Path) -> None:
    def run(resume: str | None = None) -> dict[str, torch.Tensor]:
        model = make("llama").bfloat16()
        return _weights(_run(folder, "ours", resume=resume, model=model, bf16=True))

    expected = run()
    # Half the checkpoint would be lost in the model's own dtype. Rank 0 has the weights.
    assert dist.get_rank() or any((value != value.bfloat16()).any() for value in expected.values())
    torch.testing.assert_close(run(str(folder / "checkpoint-4")), expected, rtol=0, atol=0)


def test_a_model_in_bf16_resumes_with_all_digits_of_its_masters(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_resumes_in_bf16, tmp_path)


def _fill_disk_at_step_4(trainer: Any, output_dir: str) -> None:
    if trainer.state.global_step == 4 and trainer.args.should_save:
        raise OSError(f"no space left on device for {output_dir}")


def _fails_to_save(folder: Path) -> None:
    straight = _run(folder, "ours")
    expected = _weights(straight)
    kept = {file: file.read_bytes() for file in (folder / "checkpoint-4").rglob("*.*")}
    failing = patch.object(SSHSDPTrainer, "_save_scaler", _fill_disk_at_step_4)
    with failing, pytest.raises((OSError, RuntimeError), match="no space left"):
        _run(folder, "ours")
    dist.barrier()
    # Here an earlier training's checkpoint was to be replaced ...
    assert kept == {file: file.read_bytes() for file in (folder / "checkpoint-4").rglob("*.*")}
    # ... and there nothing was.
    with failing, pytest.raises((OSError, RuntimeError), match="no space left"):
        _run(folder / "new", "ours")
    dist.barrier()
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["checkpoint-2"]
    resumed = _run(folder / "new", "ours", resume=True)
    torch.testing.assert_close(_weights(resumed), expected, rtol=0, atol=0)


def test_a_save_that_fails_leaves_what_was_there(two_ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint is complete or absent, and the last complete one is resumed from."""
    two_ranks.run(_fails_to_save, tmp_path)


def _resumes_from_ddp(folder: Path) -> None:
    theirs = _run(folder / "ddp", "ddp")
    ours = _run(folder / "ours", "ours", resume=str(folder / "ddp/checkpoint-4"))
    expected = theirs.model.state_dict()
    for name, value in _weights(ours).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def test_a_stock_trainers_checkpoint_goes_on_in_shards(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_resumes_from_ddp, tmp_path)


def _keeps_the_best(folder: Path) -> None:
    # Losses rise with this rate, so the best is not the last.
    changes = {
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "save_only_model": True,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    }
    one = _run(folder, "ours", **changes)
    best = Path(one.state.best_model_checkpoint)
    saved = load_file(best / "model.safetensors")
    assert best.name != "checkpoint-6"
    for name, value in _weights(one).items():
        if name in saved:
            torch.testing.assert_close(value, saved[name], rtol=0, atol=0)
    kept = {path.name for path in folder.iterdir() if path.name.startswith("checkpoint")}
    assert best.name in kept and len(kept) <= 2
    assert not (best / "optimizer_0").exists()
    one.save_model(folder / "final")
    one.accelerator.wait_for_everyone()
    again = type(one.model).from_pretrained(folder / "final")
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, saved.get(name, value), rtol=0, atol=0)


def test_the_best_model_is_loaded_and_saved_as_safetensors(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(_keeps_the_best, tmp_path)


def _generates(folder: Path) -> None:
    predictions = {}
    for side in ("ddp", "ours"):
        one = trainer(side, folder, "t5", seq2seq=True, predict_with_generate=True)
        one.train()
        # Ranks get different rows, and stop at different lengths.
        predictions[side] = one.predict(one.eval_dataset, max_length=7).predictions
    assert (predictions["ours"] == predictions["ddp"]).all()


def test_generating_in_evaluation_equals_ddp(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_generates, tmp_path)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("save_on_each_node", "one directory that all nodes see"),
        ("bf16_full_eval", "use bf16=True"),
        ("fp16_full_eval", "use fp16=True"),
    ],
)
def test_arguments_that_shards_cannot_do_are_refused(
    tmp_path: Path, name: str, advice: str
) -> None:
    with pytest.raises(ValueError, match=f"{name}=True.*{advice}"):
        SSHSDPTrainer(make("llama"), arguments(tmp_path, **{name: True}))


def _compiles(folder: Path) -> None:
    plain = trainer("ours", folder)
    plain.train()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compiled = trainer("ours", folder, **options)
    compiled.train()
    layer = compiled.model.model.layers[0]
    assert layer._compiled_call_impl is not None
    assert history(compiled, "loss") == pytest.approx(history(plain, "loss"), rel=1e-5)


def test_compiled_units_train_the_same(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_compiles, tmp_path)
