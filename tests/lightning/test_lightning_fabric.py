"""``Fabric(strategy="sshsdp")`` computes and stores what DDP does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.testing import assert_close

import lightning_sshsdp
from tests.lightning.comparing import assert_same_weights
from tests.lightning.modules import VOCABULARY, LanguageModel, token_loader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning.conftest import Ranks

FORMATS = ["sharded", "full"]


def _fabric(strategy: Any, **options: Any) -> Fabric:
    if strategy in FORMATS:
        strategy = lightning_sshsdp.FabricSSHSDPStrategy(checkpoint=strategy)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2, **options)
    fabric.launch()
    return fabric


def _model(seed: int = 1) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel()


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _weights(fabric: Fabric, model: Any) -> dict[str, torch.Tensor]:
    strategy = fabric.strategy
    if isinstance(strategy, lightning_sshsdp.FabricSSHSDPStrategy):
        engine = lightning_sshsdp.engine_of(model.module)
        return engine.full_state_dict(rank0_only=False)
    return {name: value.detach().clone() for name, value in model.module.state_dict().items()}


def _epoch(
    fabric: Fabric, model: Any, optimizer: Any, accumulate: int = 1, **clipping: Any
) -> list[float]:
    loader = fabric.setup_dataloaders(token_loader(16))
    losses = []
    for index, (tokens,) in enumerate(loader):
        is_accumulating = (index + 1) % accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = _loss(model, tokens)
            fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if is_accumulating:
            continue
        if clipping:
            losses.append(_norm(fabric.clip_gradients(model, optimizer, **clipping)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _norm(value: Any) -> float:
    assert value is None or type(value) is torch.Tensor
    return 0.0 if value is None else float(value)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def _train(strategy: str, optimizer_name: str, options: dict[str, Any]) -> Any:
    fabric = _fabric(strategy, precision=options.pop("precision", None))
    model = _model()
    if options.pop("separately", False):
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(_optimizer(optimizer_name, model))
    else:
        model, optimizer = fabric.setup(model, _optimizer(optimizer_name, model))
    losses = _epoch(fabric, model, optimizer, **options)
    return losses, _weights(fabric, model)


@pytest.mark.parametrize(
    ("optimizer", "options", "rtol"),
    [
        ("adamw", {}, 1e-5),
        ("momentum", {"separately": True}, 1e-5),
        ("momentum", {"accumulate": 4}, 1e-5),
        ("momentum", {"max_norm": 0.3}, 1e-5),
        ("adamw", {"max_norm": 0.3, "norm_type": "inf", "accumulate": 2}, 1e-5),
        ("momentum", {"clip_val": 0.01}, 1e-5),
        ("momentum", {"precision": "64-true"}, 1e-12),
        ("momentum", {"precision": "bf16-mixed"}, 0.03),
    ],
)
def test_loop_trains_like_ddp(
    two_ranks: Ranks, optimizer: str, options: dict[str, Any], rtol: float
) -> None:
    ddp = two_ranks.run(_train, "ddp", optimizer, options)
    ours = two_ranks.run(_train, "sshsdp", optimizer, options)
    for (losses, weights), (expected, reference) in zip(ours, ddp, strict=True):
        assert_close(losses, expected, rtol=rtol, atol=1e-6)
        if rtol < 1e-3:
            assert_same_weights(weights, reference, max(rtol, 1e-9))


def _train_compiled() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fabric = _fabric("sshsdp")
    model = _model()
    optimizer = _optimizer("momentum", model)
    model, optimizer = fabric.setup(torch.compile(model, backend="aot_eager"), optimizer)
    losses = _epoch(fabric, model, optimizer)
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compiled_model_trains_as_well(two_ranks: Ranks) -> None:
    plain = two_ranks.run(_train, "sshsdp", "momentum", {})
    for (losses, num_graphs), (expected, _) in zip(
        two_ranks.run(_train_compiled), plain, strict=True
    ):
        assert_close(losses, expected, rtol=1e-4, atol=0)
        assert num_graphs > 0


def _restores_synchronization() -> None:
    fabric = _fabric("sshsdp")
    model = _model()
    model, optimizer = fabric.setup(model, _optimizer("momentum", model))
    engine = lightning_sshsdp.engine_of(model.module)
    tokens = token_loader(1).dataset.tensors[0]

    def num_reductions() -> int:
        with engine.record_collectives() as records:
            fabric.backward(_loss(model, tokens))
        return sum(record.kind == "reduce_scatter" for record in records)

    expected = num_reductions()
    assert expected > 0
    with fabric.no_backward_sync(model, enabled=False):
        assert num_reductions() == expected
    assert num_reductions() == expected
    with fabric.no_backward_sync(model):
        with fabric.no_backward_sync(model, enabled=False):
            assert num_reductions() == 0
        assert num_reductions() == 0
    assert num_reductions() == expected
    with pytest.raises(RuntimeError, match="not finite"):
        _loss(model, tokens).mul(float("inf")).backward()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


class TestBackwardSync:
    """After ``no_backward_sync(enabled=False)``, ModelParallelStrategy leaves reductions off."""

    def test_no_backward_sync_restores_what_was_before(self, two_ranks: Ranks) -> None:
        two_ranks.run(_restores_synchronization)


def _refuses() -> None:
    fabric = _fabric("sshsdp")
    model = fabric.setup_module(_model())
    with pytest.raises(ValueError, match="setup_module"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="holds no module"):
        fabric.save("/tmp/never", {"epoch": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="attach"):
        optimizer.step()
    optimizer = fabric.setup_optimizers(optimizer)
    whole = torch.optim.SGD(_model().parameters(), lr=0.1).state_dict()
    with pytest.raises(RuntimeError, match="load_full_optimizer_state_dict"):
        optimizer.load_state_dict(whole)
    with pytest.raises(RuntimeError, match="full_optimizer_state_dict"):
        optimizer.optimizer.state_dict()
    lightning_sshsdp.engine_of(model.module).detach(optimizer.optimizer)
    optimizer.load_state_dict(whole)


def test_objects_that_were_not_set_up_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(_refuses)


def _save_and_load(checkpoint: str, path: str) -> None:
    fabric = _fabric(checkpoint)
    model = _model()
    model, optimizer = fabric.setup(model, _optimizer("adamw", model))
    _epoch(fabric, model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3, "x": "y"}
    fabric.save(path, state)
    saved = _weights(fabric, model)
    expected = _epoch(fabric, model, optimizer)
    final = _weights(fabric, model)

    fabric = _fabric(checkpoint)
    model = _model(seed=5)
    model, optimizer = fabric.setup(model, _optimizer("adamw", model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 7)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    remainder = fabric.load(path, state)
    assert state["epoch"] == 3
    assert remainder == {"x": "y"}
    assert scheduler.step_size == 3
    assert_same_weights(_weights(fabric, model), saved, rtol=0)
    assert _epoch(fabric, model, optimizer) == expected
    assert_same_weights(_weights(fabric, model), final, rtol=0)

    with pytest.raises(KeyError, match="nothing"):
        fabric.load(path, {"model": model, "nothing": 1})
    fabric.load(path, {"model": model, "nothing": 1}, strict=False)
    everything = fabric.load(path)
    assert everything["epoch"] == 3
    if checkpoint == "sharded" or fabric.global_rank == 0:
        assert_same_weights({k: everything["model"][k] for k in saved}, saved, rtol=0)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_saving_and_loading_changes_no_bit(
    two_ranks: Ranks, tmp_path: Path, checkpoint: str
) -> None:
    two_ranks.run(_save_and_load, checkpoint, str(tmp_path / "state.ckpt"))


def _exchanges_with_ddp(directory: str) -> None:
    runs = {}
    for first, second in (("ddp", "sharded"), ("full", "ddp"), ("ddp", "ddp")):
        path = f"{directory}/{first}-{second}.ckpt"
        for strategy, seed in ((first, 1), (second, 5)):
            fabric = _fabric(strategy)
            model = _model(seed)
            model, optimizer = fabric.setup(model, _optimizer("adamw", model))
            state = {"model": model, "optimizer": optimizer}
            if seed == 5:
                fabric.load(path, state)
            _epoch(fabric, model, optimizer)
            if seed == 1:
                fabric.save(path, state)
        runs[first, second] = _weights(fabric, model)
    assert_same_weights(runs["ddp", "sharded"], runs["ddp", "ddp"])
    assert_same_weights(runs["full", "ddp"], runs["ddp", "ddp"])


def test_checkpoints_are_exchanged_with_ddp(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_exchanges_with_ddp, str(tmp_path))


def _filters_and_raw_files(checkpoint: str, directory: str) -> None:
    fabric = _fabric(checkpoint)
    model = _model()
    model, optimizer = fabric.setup(model, _optimizer("momentum", model))
    _epoch(fabric, model, optimizer)
    path = f"{directory}/filtered.ckpt"
    keep = {"model": lambda name, value: "blocks.1" in name}
    fabric.save(path, {"model": model, "n": 2}, filter=keep)
    other = fabric.setup_module(_model(seed=5))
    fabric.load(path, {"model": other}, strict=False)
    trained, loaded, fresh = _weights(fabric, model), _weights(fabric, other), _model(seed=5)
    for name, value in fresh.state_dict().items():
        expected = trained[name] if "blocks.1" in name else value
        assert_close(loaded[name], expected, rtol=0, atol=0, msg=name)

    raw = f"{directory}/raw.pt"
    if fabric.global_rank == 0:
        torch.save(fresh.state_dict(), raw)
    fabric.barrier()
    fabric.load_raw(raw, model)
    assert_same_weights(_weights(fabric, model), fresh.state_dict(), rtol=0)


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_filtered_and_raw_files(two_ranks: Ranks, tmp_path: Path, checkpoint: str) -> None:
    """Lightning's own sharded strategies refuse filters on sharded checkpoints."""
    two_ranks.run(_filters_and_raw_files, checkpoint, str(tmp_path))


class _WithGenerate(LanguageModel):
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(-1)


def _calls_other_methods() -> Any:
    fabric = _fabric("sshsdp")
    torch.manual_seed(1)
    with fabric.init_module(empty_init=False):
        model = fabric.setup_module(_WithGenerate())
    model.mark_forward_method("generate")
    tokens = token_loader(1).dataset.tensors[0]
    torch.manual_seed(1)
    expected = _WithGenerate().generate(tokens)
    with torch.no_grad():
        assert torch.equal(model.generate(tokens), expected)
    total = fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum")
    assert total == 3
    assert fabric.broadcast(fabric.global_rank + 7, src=1) == 8
    assert fabric.strategy.reduce_boolean_decision(fabric.global_rank == 0, all=False)
    assert not fabric.strategy.reduce_boolean_decision(fabric.global_rank == 0)
    assert fabric.all_gather(torch.tensor([fabric.global_rank])).flatten().tolist() == [0, 1]


def test_methods_beside_forward_and_collectives(two_ranks: Ranks) -> None:
    two_ranks.run(_calls_other_methods)


def _materializes() -> None:
    fabric = _fabric("sshsdp")
    with fabric.init_module(empty_init=True):
        model = LanguageModel()
    assert all(p.is_meta for p in model.parameters())
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(_optimizer("adamw", model))
    losses = _epoch(fabric, model, optimizer)
    assert len(losses) == 8
    assert losses[0] < 3 * torch.tensor(float(VOCABULARY)).log()


def test_models_on_meta_are_initialised(two_ranks: Ranks) -> None:
    two_ranks.run(_materializes)


def _trains_two_models() -> Any:
    results = {}
    for strategy in ("ddp", "sshsdp"):
        fabric = _fabric(strategy)
        torch.manual_seed(2)
        first, second = nn.Linear(4, 4), nn.Linear(4, 1)
        first, opt1 = fabric.setup(first, torch.optim.SGD(first.parameters(), lr=0.1))
        second, opt2 = fabric.setup(second, torch.optim.Adam(second.parameters(), lr=0.1))
        x = torch.ones(2, 4) * (fabric.global_rank + 1)
        for _ in range(3):
            loss = second(torch.tanh(first(x))).square().mean()
            fabric.backward(loss)
            norm = fabric.clip_gradients(second, opt2, max_norm=0.1)
            for optimizer in (opt1, opt2):
                optimizer.step()
                optimizer.zero_grad()
        state = {**_weights(fabric, first), "norm": norm}
        results[strategy] = {**state, **{f"2.{k}": v for k, v in _weights(fabric, second).items()}}
    assert_same_weights(results["sshsdp"], results["ddp"])


def test_models_that_are_set_up_one_by_one(two_ranks: Ranks) -> None:
    two_ranks.run(_trains_two_models)
