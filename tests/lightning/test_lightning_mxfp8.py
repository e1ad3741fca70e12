"""``precision="mxfp8"``: of the Trainer, of Fabric, and of the strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import lightning_sshsdp
import sshsdp
from lightning_sshsdp.options import runtime_policy
from tests.lightning.modules import Block, LanguageModel, LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lightning.conftest import Ranks


class WideModule(LanguageModule):
    """A module whose blocks MXFP8 can take."""

    def _build(self) -> None:
        torch.manual_seed(self.hparams.seed)
        model = LanguageModel()
        model.embedding = nn.Embedding(29, 64)
        model.blocks = nn.ModuleList(Block(64) for _ in range(3))
        model.norm = nn.LayerNorm(64)
        model.head = nn.Linear(64, 29, bias=False)
        model.head.weight = model.embedding.weight
        self.model = model


def quantized(engine: sshsdp.Engine) -> list[str]:
    """Kinds of parameters that are in MXFP8."""
    return sorted(
        {
            ".".join(region.name.split(".")[-2:])
            for unit in engine.layout.units
            for space, dtype in zip(unit.spaces, unit.runtime_dtypes, strict=True)
            for region in space.regions
            if dtype == torch.float8_e4m3fn
        }
    )


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trainer": ("sshsdp", {"precision": "mxfp8"}),
    "strategy": ({"precision": "mxfp8"}, {"precision": "bf16-mixed"}),
    "fields": ({"runtime": {"format": "mxfp8"}}, {"precision": "bf16-mixed"}),
    "patterns": ({"runtime": {"formats": {"*blocks.*": "mxfp8"}}}, {"precision": "bf16-mixed"}),
    "fp32": ({"precision": "mxfp8"}, {"precision": "32-true"}),
    "dense": ("sshsdp", {"precision": "bf16-mixed"}),
}


def fit(way: str) -> tuple[list[float], list[str], set[str], str]:
    strategy, options = WAYS[way]
    if isinstance(strategy, dict):
        strategy = lightning_sshsdp.SSHSDPStrategy(**strategy)
    module = WideModule("momentum")
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, token_loader(16))
    engine = trainer.strategy.engine
    dtypes = {str(p.dtype) for name, p in module.named_parameters() if "norm" in name}
    return module.losses, quantized(engine), dtypes, trainer.precision


def test_a_trainer_trains_in_mxfp8_however_it_is_asked_to(two_ranks: Ranks) -> None:
    found = {way: two_ranks.run(fit, way)[0] for way in WAYS}
    for way in ("trainer", "strategy", "fields", "patterns"):
        losses, names, norms, _ = found[way]
        assert names == ["down.weight", "up.weight"], way
        assert losses == found["trainer"][0], way
        # Normalisation stays fp32, as under bf16-mixed alone.
        assert norms == {"torch.float32"}
    dense = found["dense"]
    assert dense[1] == []
    assert found["trainer"][0] != dense[0]
    # Rounding moves a weight or an activation by a sixteenth at most.
    assert found["trainer"][0] == pytest.approx(dense[0], rel=1 / 16)
    assert found["fp32"][1] == ["down.weight", "up.weight"]
    assert found["fp32"][0] == pytest.approx(dense[0], rel=1 / 16)


def train_with_fabric(way: str) -> tuple[list[float], list[str]]:
    strategy: Any = "sshsdp"
    options: dict[str, Any] = {"precision": "mxfp8"}
    if way == "strategy":
        strategy = lightning_sshsdp.FabricSSHSDPStrategy(precision="mxfp8")
        options = {"precision": "bf16-mixed"}
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2, **options)
    fabric.launch()
    module = WideModule()
    assert module.model is not None
    plain = module.model
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    losses = []
    for (tokens,) in fabric.setup_dataloaders(token_loader(8)):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine = lightning_sshsdp.engine_of(plain)
    assert engine is not None
    return losses, quantized(engine)


def test_fabric_trains_in_mxfp8(two_ranks: Ranks) -> None:
    losses, names = two_ranks.run(train_with_fabric, "fabric")[0]
    assert (losses, names) == two_ranks.run(train_with_fabric, "strategy")[0]
    assert len(names) == 2
    assert losses[-1] < losses[0]


def resume(folder: Path, precision: str | None) -> dict[str, torch.Tensor]:
    """Train in MXFP8 and save; or load what was saved, in another precision."""
    module = WideModule("momentum")
    trainer = make_trainer("sshsdp", precision=precision or "mxfp8", max_steps=2)
    if precision is None:
        trainer.fit(module, token_loader(16))
        trainer.save_checkpoint(folder / "saved.ckpt")
    else:
        trainer.validate(module, token_loader(4), ckpt_path=str(folder / "saved.ckpt"))
    engine: sshsdp.Engine = trainer.strategy.engine
    return engine.full_state_dict(rank0_only=False)


def test_a_checkpoint_of_an_mxfp8_run_loads_in_any_precision(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    saved = two_ranks.run(resume, tmp_path, None)[0]
    for precision in ("32-true", "mxfp8"):
        loaded = two_ranks.run(resume, tmp_path, precision)[0]
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_other_strategies_and_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="precision='mxfp8' is the sshsdp strategy's"):
        make_trainer("auto", devices=1, precision="mxfp8")
    with pytest.raises(ValueError, match="must be 'mxfp8' or left out"):
        lightning_sshsdp.SSHSDPStrategy(precision="bf16-mixed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'mxfp8' or left out"):
        lightning_sshsdp.FabricSSHSDPStrategy(precision="fp8")
    with pytest.raises(ValueError, match="Precision 'fp8' is invalid"):
        make_trainer("sshsdp", precision="fp8")
    with pytest.raises(ValueError, match=r"write RuntimePolicy\(format='mxfp8'"):
        lightning_sshsdp.SSHSDPStrategy(runtime=sshsdp.RuntimePolicy(), precision="mxfp8")
    with pytest.raises(ValueError, match="bfloat16, float32 or float64"):
        runtime_policy(None, "16-mixed", nn.Module(), quantizes=True)
