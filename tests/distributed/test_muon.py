"""`sshsdp.optim.Muon` on meshes: torch.optim.Muon's weights, by owners and by Gram matrices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sshsdp.optim import muon_with_adamw
from tests.support.compare import assert_weights_close
from tests.support.matrices import Case, train_plain, train_sharded

if TYPE_CHECKING:
    from collections.abc import Callable

# The Gram matrix of a matrix has the square of its condition number; iterations bring it out.
TOLERANCES = {"owner": 1e-11, "gram": 1e-9}

pytestmark = pytest.mark.usefixtures("double")


def ours(model: nn.Module, method: str) -> list[torch.optim.Optimizer]:
    """Muon in full precision on the hidden matrices, AdamW on the rest, in one optimizer."""
    return [
        muon_with_adamw(
            model,
            lr=0.02,
            weight_decay=0.1,
            adamw_lr=3e-3,
            method=method,
            ns_dtype=torch.get_default_dtype(),
        )
    ]


def theirs(model: nn.Module) -> list[Any]:
    """The same with torch's classes, each expert and convolution as a matrix of its own."""
    (mixed,) = ours(model, "owner")
    hidden, *others = mixed.param_groups
    options = ("params", "lr", "weight_decay", "betas")
    groups = [{key: group[key] for key in options} for group in others]
    return [_MuonOfMatrices(hidden["params"]), torch.optim.AdamW(groups)]


class _MuonOfMatrices:
    """torch.optim.Muon, which takes 2-D parameters only, on the matrices inside of parameters."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.pairs = []
        for parameter in parameters:
            whole = parameter.detach()
            parts = whole.unbind(0) if whole.ndim == 3 else [whole.flatten(1)]
            for index, part in enumerate(parts):
                self.pairs.append((parameter, index, nn.Parameter(part)))
        self.inner = torch.optim.Muon(
            [part for *_, part in self.pairs],
            lr=0.02,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        )

    def step(self) -> None:
        for parameter, index, part in self.pairs:
            grad = parameter.grad
            assert grad is not None
            part.grad = grad[index] if grad.ndim == 3 else grad.flatten(1)
        self.inner.step()


def check(workers: Callable[[int], Any], case: Case, reference: Any, tolerance: float) -> None:
    actual, norms = workers(case.size).run(train_sharded, case)[0]
    plain = Case(**{**vars(case), "make": reference})
    expected, expected_norms = train_plain(plain)
    for state_dict in (actual, expected):
        for name in [n for n in state_dict if "running_" in n or "num_" in n]:
            del state_dict[name]
    assert_weights_close(actual, expected, tolerance)
    if case.clip is not None:
        assert norms == pytest.approx(expected_norms, rel=tolerance)


@pytest.mark.parametrize("mesh", [(1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("method", TOLERANCES)
@pytest.mark.parametrize("subject", ["decoder", "experts", "convolutions", "llama"])
def test_twenty_steps_equal_torch_s(
    workers: Callable[[int], Any], subject: str, method: str, mesh: Any
) -> None:
    make = partial(ours, method=method)
    case = Case(subject=subject, make=make, mesh=mesh, packs=subject == "llama")
    check(workers, case, theirs, TOLERANCES[method])


WAYS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {"micro_batches": 3, "clip": 0.3},
    "replicated updates": {"sharding": "replicated"},
    "four shards": {"mesh": (1, 4)},
}


@pytest.mark.parametrize("method", TOLERANCES)
@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_equal_torch_s_with(
    workers: Callable[[int], Any], way: str, method: str
) -> None:
    make = partial(ours, method=method)
    case = Case(subject="decoder", make=make, **{"mesh": (2, 2), **WAYS[way]})
    check(workers, case, theirs, TOLERANCES[method])
