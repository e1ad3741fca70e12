"""Each precision trains like DDP's of the same name, or is refused with those that do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision
from torch import nn
from torch.testing import assert_close

import lightning_sshsdp
import sshsdp
from lightning_sshsdp.grad_scaler import GlobalGradScaler
from lightning_sshsdp.options import runtime_policy
from tests.lightning.comparing import assert_same_weights, weights_of
from tests.lightning.modules import LanguageModule, make_trainer, token_loader

if TYPE_CHECKING:
    from tests.lightning.conftest import Ranks


def _fit(strategy: Any, module: LanguageModule, **options: Any) -> Any:
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, token_loader(16))
    return trainer


def _compare(precision: str, rtol: float) -> dict[str, Any]:
    reference, module = LanguageModule("momentum"), LanguageModule("momentum")
    _fit("ddp", reference, precision=precision)
    trainer = _fit("sshsdp", module, precision=precision)
    assert_close(module.losses, reference.losses, rtol=rtol, atol=0)
    assert module.losses[-1] < module.losses[0]
    engine = trainer.strategy.engine
    return {
        "runtime": {name: str(p.dtype) for name, p in module.named_parameters()},
        "update": {name: str(p.tensor.dtype) for name, p in engine.update_parameters()},
    }


class _Overflows(LanguageModule):
    """In its third step, one element of one parameter's gradient overflows, on rank 1 only."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            loss = loss + 1e36 * self.model.norm.bias[0].float()
        return loss


def _fit_with_scaler(strategy: Any) -> tuple[list[float], dict[str, torch.Tensor], float, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    module = _Overflows("momentum")
    trainer = _fit(strategy, module, plugins=plugin, gradient_clip_val=1.0)
    scale = trainer.precision_plugin.scaler.get_scale()
    return module.losses, weights_of(trainer), scale, type(trainer.precision_plugin.scaler)


class TestPrecisions:
    """ModelParallelStrategy refuses 16-mixed and 64-true."""

    @pytest.mark.parametrize(
        ("precision", "rtol", "runtime", "update"),
        [
            ("32-true", 1e-5, "torch.float32", "torch.float32"),
            ("64-true", 1e-12, "torch.float64", "torch.float64"),
            ("bf16-mixed", 0.03, "torch.bfloat16", "torch.float32"),
            ("bf16-true", 0.05, "torch.bfloat16", "torch.bfloat16"),
            ("16-true", 0.02, "torch.float16", "torch.float16"),
        ],
    )
    def test_precision_trains_like_ddp(
        self, two_ranks: Ranks, precision: str, rtol: float, runtime: str, update: str
    ) -> None:
        for dtypes in two_ranks.run(_compare, precision, rtol):
            norms = {name for name in dtypes["runtime"] if "norm" in name}
            is_mixed = precision.endswith("-mixed")
            for name, dtype in dtypes["runtime"].items():
                # Normalisation stays fp32 where autocast would run it in fp32.
                assert dtype == ("torch.float32" if is_mixed and name in norms else runtime), name
            assert set(dtypes["update"].values()) == {update}

    def test_all_ranks_skip_the_step_in_which_one_rank_overflows(self, two_ranks: Ranks) -> None:
        ddp = two_ranks.run(_fit_with_scaler, "ddp")
        ours = two_ranks.run(_fit_with_scaler, "sshsdp")
        for (losses, weights, scale, kind), (expected, reference, wanted_scale, _) in zip(
            ours, ddp, strict=True
        ):
            assert kind is GlobalGradScaler
            assert scale == wanted_scale
            assert all(torch.isfinite(value).all() for value in weights.values())
            assert_close(losses, expected, rtol=0.02, atol=0)
            assert_close(weights, reference, rtol=0.05, atol=0.01)
        assert_same_weights(ours[0][1], ours[1][1], rtol=0)

    def test_precisions_of_other_strategies_are_refused(self) -> None:
        with pytest.raises(ValueError, match="16-mixed"):
            make_trainer("sshsdp", plugins=FSDPPrecision("bf16-mixed"))
        with pytest.raises(ValueError, match="choose one of 32-true"):
            lightning_sshsdp.SSHSDPStrategy(precision_plugin=FSDPPrecision("32-true"))


def _policies_win() -> None:
    strategy = lightning_sshsdp.SSHSDPStrategy(
        runtime={"dtype": "float32", "prefetch": 2, "formats": {"*head*": "bfloat16"}},
        update=sshsdp.UpdatePolicy(dtype=None),
    )
    module = LanguageModule()
    trainer = _fit(strategy, module, precision="bf16-mixed")
    engine = trainer.strategy.engine
    assert engine.runtime.prefetch == 2
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    # The embedding is tied to the head, and known by both names.
    assert dtypes.pop("model.embedding.weight") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}


def test_policies_that_are_given_go_before_the_precision(two_ranks: Ranks) -> None:
    two_ranks.run(_policies_win)


def test_packs_are_written_as_names() -> None:
    names = ["q.weight", "k.weight"]
    written = {"packs": [names, {"names": names, "fuse": True}]}
    policy = runtime_policy(written, "32-true", nn.Module())
    assert policy.packs == (sshsdp.Pack(tuple(names)), sshsdp.Pack(tuple(names), fuse=True))
    model = nn.Module()
    model.gate_proj, model.up_proj = nn.Linear(3, 2), nn.Linear(3, 2)
    found = runtime_policy({"packs": "auto"}, "32-true", model).packs
    assert [pack.names for pack in found] == [("gate_proj.weight", "up_proj.weight")]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"runtime": {"prefetch_units": 2}}, ValueError, "prefetch_units.*prefetch"),
        ({"runtime": {"dtype": "bf16"}}, ValueError, "bfloat16"),
        ({"runtime": {"prefetch": -1}}, ValueError, "prefetch"),
        ({"update": "fp32"}, TypeError, "UpdatePolicy"),
        ({"checkpoint": "single"}, ValueError, "'sharded' or 'full'"),
    ],
)
def test_wrong_options_are_named_when_the_strategy_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lightning_sshsdp.SSHSDPStrategy(**options)
