"""Optimizers that see whole matrices: the same weights as in one process, on every mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.support.compare import assert_weights_close
from tests.support.matrices import Case, train_plain, train_sharded

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")

MESHES = [(1, 4), (2, 2)]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon on the matrices inside of the model, AdamW on the rest."""
    hidden = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and not any(part in name for part in ("embed", "position", "head"))
    ]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    return [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-3, weight_decay=0.1),
    ]


def check(workers: Callable[[int], Any], case: Case, tolerance: float = 1e-11) -> None:
    actual, norms = workers(case.size).run(train_sharded, case)[0]
    expected, expected_norms = train_plain(case)
    for state_dict in (actual, expected):
        for name in [n for n in state_dict if "running_" in n or "num_" in n]:
            del state_dict[name]
    assert_weights_close(actual, expected, tolerance)
    if case.clip is not None:
        assert norms == pytest.approx(expected_norms, rel=tolerance)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("subject", ["decoder", "convolutions", "experts"])
def test_muon_beside_adamw_equals_one_process(
    workers: Callable[[int], Any], subject: str, mesh: Any
) -> None:
    check(workers, Case(subject=subject, make=muon_and_adamw, mesh=mesh))


WAYS: dict[str, dict[str, Any]] = {
    "accumulation under no_sync": {"micro_batches": 3},
    "accumulation of reduced gradients": {"micro_batches": 2, "defers": False},
    "clipping": {"clip": 0.3},
    "replicated updates": {"sharding": "replicated"},
    "all together": {"micro_batches": 2, "clip": 0.3, "sharding": "replicated"},
}


@pytest.mark.parametrize("mesh", [(1, 3), (2, 2), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_muon_beside_adamw_equals_one_process_with(
    workers: Callable[[int], Any], way: str, mesh: Any
) -> None:
    check(workers, Case(subject="decoder", make=muon_and_adamw, mesh=mesh, **WAYS[way]))


class Normalised(torch.optim.Optimizer):
    """Steps along each gradient's direction: a class that nobody knows, on whole tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


def unknown(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Normalised(model.parameters(), lr=0.02)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("subject", ["decoder", "llama", "experts", "convolutions"])
def test_an_unknown_optimizer_sees_every_parameter_whole(
    workers: Callable[[int], Any], subject: str, mesh: Any
) -> None:
    packs = subject == "llama"
    check(workers, Case(subject=subject, make=unknown, mesh=mesh, packs=packs))
