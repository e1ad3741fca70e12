"""Every elementwise optimizer goes on as if nothing had happened, from each kind of state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from sshsdp.checkpoint.optimizer_state import place_scalar
from tests.support.compare import ROUNDING
from tests.support.training import OWN_DTYPES
from tests.support.workers import WorkersFailedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("double")

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
}


class Scaled(nn.Module):
    """Parameters of 0, 1 and 2 dims, some with a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.last = nn.Linear(5, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs) * self.scale + self.shift
        return self.last(hidden.tanh()).pow(2).mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    """Steps ``[start, stop)`` with the same batches on every rank; the losses."""
    losses = []
    for number in range(start, stop):
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On one process, without the engine."""
    torch.manual_seed(0)
    model = Scaled()
    return model, MAKERS[name](model.parameters())


def sharded(name: str) -> tuple[nn.Module, torch.optim.Optimizer, sshsdp.Engine]:
    """The same, sharded."""
    torch.manual_seed(0)
    model = Scaled()
    engine = sshsdp.shard(model, **OWN_DTYPES)
    return model, engine.attach(MAKERS[name](model.parameters())), engine


def go_on(folder: Path, name: str) -> dict[str, list[float]]:
    """Three steps, then three more from each kind of state."""
    model, optimizer, engine = sharded(name)
    step(model, optimizer, 0, 3)
    engine.save(folder / name, optimizer)
    weights = engine.full_state_dict(rank0_only=False)
    whole = [engine.full_optimizer_state_dict(optimizer)]
    dist.broadcast_object_list(whole, src=0)
    losses = {"straight": step(model, optimizer, 3, 6)}

    model, optimizer, engine = sharded(name)
    engine.load(folder / name, optimizer)
    losses["checkpoint"] = step(model, optimizer, 3, 6)

    model, optimizer, engine = sharded(name)
    engine.load_full_state_dict(weights)
    engine.load_full_optimizer_state_dict(optimizer, whole[0])
    losses["whole state"] = step(model, optimizer, 3, 6)

    model, optimizer = plain(name)
    model.load_state_dict(weights)
    optimizer.load_state_dict(whole[0])
    losses["whole state in plain torch"] = step(model, optimizer, 3, 6)

    model, optimizer = plain(name)
    step(model, optimizer, 0, 3)
    weights, state = model.state_dict(), optimizer.state_dict()
    model, optimizer, engine = sharded(name)
    engine.load_full_state_dict(weights)
    engine.load_full_optimizer_state_dict(optimizer, state)
    losses["plain torch's state"] = step(model, optimizer, 3, 6)
    return losses


@pytest.mark.parametrize("name", MAKERS)
def test_the_next_losses_are_those_of_a_run_that_never_stopped(
    tmp_path: Path, workers: Callable[[int], Any], name: str
) -> None:
    """databricks/flashoptim#3: the loss rose to 1785 after a round trip of optimizer state."""
    for losses in workers(2).run(go_on, tmp_path, name):
        assert losses["checkpoint"] == losses["straight"]
        assert losses["whole state"] == losses["straight"]
        for kind in ("whole state in plain torch", "plain torch's state"):
            assert losses[kind] == pytest.approx(losses["straight"], rel=ROUNDING)


def save_two(folder: Path) -> tuple[list[float], list[float], str]:
    """Two optimizers in one checkpoint; read back in the same order, and in another."""

    def make() -> tuple[nn.Module, list[torch.optim.Optimizer], sshsdp.Engine]:
        torch.manual_seed(0)
        model = Scaled()
        engine = sshsdp.shard(model, **OWN_DTYPES)
        matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], 0.1, momentum=0.9)
        vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)
        return model, engine.attach([matrices, vectors]), engine

    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[float]:
        losses = []
        for number in range(3):
            loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number)))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizers, engine = make()
    train(model, optimizers)
    engine.save(folder / "two", optimizers)
    straight = train(model, optimizers)
    model, optimizers, engine = make()
    engine.load(folder / "two", optimizers)
    resumed = train(model, optimizers)
    try:
        engine.load(folder / "two", optimizers[::-1])
    except ValueError as error:
        return straight, resumed, str(error)
    return straight, resumed, "no error"


def test_several_optimizers_share_a_checkpoint(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    straight, resumed, message = workers(2).run(save_two, tmp_path)[0]
    assert resumed == straight
    assert "param group 0 has other parameters in the checkpoint" in message


def lr_after_load(folder: Path, saved: str, loaded: str) -> tuple[Any, bool]:
    """The learning rate of another run, and whether it is still the object that the run had."""
    model, optimizer, engine = sharded(saved)
    step(model, optimizer, 0, 1)
    engine.save(folder / "checkpoint", optimizer)
    _, optimizer, engine = sharded(loaded)
    optimizer.param_groups[0]["lr"] *= 5
    before = optimizer.param_groups[0]["lr"]
    engine.load(folder / "checkpoint", optimizer)
    after = optimizer.param_groups[0]["lr"]
    return after, after is before


def test_a_learning_rate_keeps_its_kind(tmp_path: Path, workers: Callable[[int], Any]) -> None:
    """A compiled optimizer reads the tensor that it was given; a foreach one wants a number."""
    lr, is_same = workers(1).run(lr_after_load, tmp_path, "AdamW", "AdamW tensor lr")[0]
    assert is_same
    assert lr == torch.tensor(1e-2)
    lr, _ = workers(1).run(lr_after_load, tmp_path, "AdamW tensor lr", "AdamW")[0]
    assert isinstance(lr, float)
    assert lr == pytest.approx(1e-2)


def test_step_counts_go_where_the_kernels_read_them() -> None:
    """Fused kernels on an accelerator want `step` there, the others on the host."""
    update = torch.empty(3, device="meta")
    count = torch.tensor(7.0)
    assert place_scalar(count, "step", update, {"fused": True}).device.type == "meta"
    assert place_scalar(count, "step", update, {"capturable": True}).device.type == "meta"
    assert place_scalar(count, "mu_product", update, {}).device.type == "meta"
    kept = place_scalar(count, "step", update, {"foreach": True, "fused": None})
    assert kept == count
    assert kept is not count
    assert place_scalar(None, "anything", update, {}) is None


def load_into(folder: Path, case: str) -> str:
    """Errors of loading optimizer state where it does not belong, or saving what cannot be."""
    path = folder / "checkpoint"
    model, optimizer, engine = sharded("AdamW")
    step(model, optimizer, 0, 1)
    full = engine.full_optimizer_state_dict(optimizer)
    first = next(iter(optimizer.state.values()))
    if case == "odd state":
        first["history"] = {"a"}
    elif case == "odd shape":
        first["odd"] = torch.zeros(2, 3)
    elif case == "nested setting":
        optimizer.param_groups[0]["schedule"] = {"warmup": 10}
    try:
        engine.save(path, None if case == "no optimizer" else optimizer)
        torch.manual_seed(0)
        model = Scaled()
        engine = sshsdp.shard(model, **OWN_DTYPES)
        weights = engine.full_state_dict()
        parameters = list(model.parameters())
        groups: list[Any] = [{"params": parameters}]
        if case == "more groups":
            groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        elif case == "fewer parameters":
            groups = [{"params": parameters[:-1]}]
        optimizer = engine.attach(torch.optim.AdamW(groups))
        if case == "whole, wrong shape" and dist.get_rank() == 0:
            full["state"][0]["exp_avg"] = torch.zeros(7)
        elif case == "whole, not a state dict":
            full = {"state": {}}
        if case.startswith("whole"):
            engine.load_full_optimizer_state_dict(optimizer, full)
        engine.load(path, optimizer)
    except ValueError as error:
        if "load" in str(error):
            unchanged = engine.full_state_dict()
            assert all(torch.equal(unchanged[key], weights[key]) for key in weights)
            assert not optimizer.state
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("no optimizer", "the checkpoint holds no optimizer under 'optimizer' (it has model)"),
        (
            "more groups",
            "the checkpoint has 1 param groups under 'optimizer', the optimizers given",
        ),
        ("fewer parameters", "other parameters in the checkpoint than in the optimizer: last.bias"),
        ("odd state", "optimizer state 'history' of 'first.weight' is a set"),
        ("odd shape", "optimizer state 'odd' of 'first.weight' has shape (2, 3), which is neither"),
        ("nested setting", "setting 'schedule' of a param group of AdamW is a dict"),
        ("whole, wrong shape", "optimizer state 'exp_avg' of 'scale' has shape (7,)"),
        ("whole, not a state dict", "load_full_optimizer_state_dict: KeyError: 'param_groups'"),
    ],
)
def test_optimizer_state_that_does_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, workers: Callable[[int], Any], case: str, expected: str
) -> None:
    for message in workers(2).run(load_into, tmp_path, case):
        assert expected in message


def freeze_later(folder: Path, freezes: bool) -> tuple[list[str], list[float], list[float]]:
    """Train all, save, resume with a frozen layer; warnings, and the layer's weights."""
    model, optimizer, engine = sharded("AdamW")
    step(model, optimizer, 0, 2)
    engine.save(folder / "checkpoint", optimizer)
    before = engine.full_state_dict(rank0_only=False)["last.weight"].flatten().tolist()
    torch.manual_seed(1)
    model = Scaled()
    model.last.requires_grad_(not freezes)
    engine = sshsdp.shard(model, **OWN_DTYPES)
    optimizer = engine.attach(torch.optim.AdamW(model.parameters()))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sshsdp.checkpoint")
    logger.addHandler(handler)
    try:
        engine.load(folder / "checkpoint", optimizer)
    finally:
        logger.removeHandler(handler)
    after = engine.full_state_dict(rank0_only=False)["last.weight"].flatten().tolist()
    step(model, optimizer, 2, 3)
    return messages, before, after


@pytest.mark.parametrize("freezes", [True, False])
def test_state_of_parameters_that_were_frozen_since_is_named(
    tmp_path: Path, workers: Callable[[int], Any], freezes: bool
) -> None:
    """pytorch/pytorch#192202: the state of later-frozen parameters was dropped in silence."""
    found = workers(2).run(freeze_later, tmp_path, freezes)
    for rank, (messages, before, after) in enumerate(found):
        assert before == after
        # Once, not once for each rank.
        assert bool(messages) == (freezes and rank == 0)
        assert all("last.weight, last.bias is not read" in message for message in messages)


def mismatch_raises(folder: Path) -> None:
    """Only rank 1 asks for something that is not there."""
    _, optimizer, engine = sharded("AdamW")
    engine.save(folder / "checkpoint", optimizer)
    engine.load(folder / ("checkpoint" if dist.get_rank() == 0 else "elsewhere"), optimizer)


def test_a_path_that_one_rank_lacks_fails_on_all(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    with pytest.raises(WorkersFailedError) as caught:
        workers(2).run(mismatch_raises, tmp_path)
    assert "RuntimeError: engine.load() failed on other ranks: rank 1: FileNotFound" in str(
        caught.value
    )
