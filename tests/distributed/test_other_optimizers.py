"""Optimizers from torch, transformers and PyPI, unmodified: one process's weights on every mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytorch_optimizer
import torch
from transformers.optimization import Adafactor

from tests.distributed.test_matrix_optimizers import check
from tests.support.matrices import Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)]


def adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    # Its state is there before the first step.
    return [torch.optim.Adagrad(model.parameters(), lr=0.02, initial_accumulator_value=0.1)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=0.02)]


def transformers_adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Adafactor(model.parameters(), lr=None)]


def lion(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [pytorch_optimizer.Lion(model.parameters(), lr=1e-3)]


def soap(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [pytorch_optimizer.SOAP(model.parameters(), lr=3e-3, precondition_frequency=5)]


def shampoo(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [pytorch_optimizer.Shampoo(model.parameters(), lr=1e-3)]


pytestmark = pytest.mark.usefixtures("double")

CASES: list[tuple[Make, str, tuple[int, int]]] = [
    (adamw, "convolutions", (2, 2)),
    (sgd, "experts", (1, 4)),
    (adagrad, "decoder", (2, 2)),
    (adafactor, "decoder", (1, 4)),
    (adafactor, "experts", (2, 2)),
    (transformers_adafactor, "decoder", (2, 2)),
    (transformers_adafactor, "convolutions", (1, 4)),
    (lion, "decoder", (2, 2)),
    (soap, "decoder", (1, 4)),
    (soap, "experts", (2, 2)),
    (shampoo, "decoder", (2, 2)),
    (shampoo, "convolutions", (1, 4)),
]


@pytest.mark.parametrize(("make", "subject", "mesh"), CASES)
def test_twenty_steps_equal_one_process(
    workers: Callable[[int], Any], make: Make, subject: str, mesh: tuple[int, int]
) -> None:
    check(workers, Case(subject=subject, make=make, mesh=mesh))
