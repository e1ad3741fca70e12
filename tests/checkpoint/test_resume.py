"""Training goes on from a checkpoint as if it had never stopped, on any mesh, from any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import sshsdp
from tests.checkpoint.training import OPTIMIZERS, WIDTH, make_fsdp2, make_sshsdp, train
from tests.support.compare import ROUNDING, assert_within, relative_error
from tests.support.subject import in_double
from tests.support.training import OWN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("double")

State = dict[str, Any]


def save_and_continue(folder: Path, optimizer: str) -> dict[str, Any]:
    """Five steps, save (sshsdp's and FSDP2's own), five more; what came out of those."""
    model, attached, engine = make_sshsdp(optimizer)
    train(model, attached, 0, 5)
    engine.save(folder / "own", attached, extra={"step": 5, "nested": {"list": [1, 2.5, "x"]}})
    losses = train(model, attached, 5, 10)
    result = {
        "losses": losses,
        "model": engine.full_state_dict(),
        "optimizer": engine.full_optimizer_state_dict(attached),
    }
    peer, peer_optimizer = make_fsdp2(optimizer)
    train(peer, peer_optimizer, 0, 5)
    states = get_state_dict(peer, peer_optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder / "fsdp2")
    return result


def resume(folder: Path, source: str, optimizer: str, mesh: tuple[int, int] | None) -> State:
    """Load and do the last five steps."""
    model, attached, engine = make_sshsdp(optimizer, mesh)
    extra = engine.load(folder / source, attached)
    return {
        "extra": extra,
        "losses": train(model, attached, 5, 10),
        "model": engine.full_state_dict(),
        "optimizer": engine.full_optimizer_state_dict(attached),
    }


def resume_under_fsdp2(folder: Path, optimizer: str) -> list[float]:
    """An FSDP2 program loads what sshsdp saved."""
    model, plain = make_fsdp2(optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, plain), strict=True))
    dcp.load(states, checkpoint_id=folder / "own")
    set_state_dict(
        model, plain, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    return train(model, plain, 5, 10)


@pytest.fixture(scope="module", params=list(OPTIMIZERS))
def saved(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    workers: Callable[[int], Any],
) -> tuple[Path, str, State]:
    """A folder with both checkpoints of a two-rank run, the optimizer, and how the run went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    # A fixture of a module comes before `double`, which is a test's.
    with in_double():
        return folder, request.param, workers(2).run(save_and_continue, folder, request.param)[0]


def _tensors(state: State) -> list[torch.Tensor]:
    values = [v for entries in state["optimizer"]["state"].values() for v in entries.values()]
    return [*state["model"].values(), *(torch.as_tensor(v) for v in values if v is not None)]


def assert_equal(actual: State, expected: State, tolerance: float) -> None:
    for left, right in zip(_tensors(actual), _tensors(expected), strict=True):
        assert_within(relative_error(left, right), tolerance)
    assert actual["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_resuming_is_bit_exact(saved: Any, workers: Callable[[int], Any]) -> None:
    folder, optimizer, expected = saved
    result = workers(2).run(resume, folder, "own", optimizer, None)[0]
    assert result["extra"] == {"step": 5, "nested": {"list": [1, 2.5, "x"]}}
    assert result["losses"] == expected["losses"]
    assert_equal(result, expected, 0.0)


@pytest.mark.parametrize(("size", "mesh"), [(1, None), (4, None), (4, (2, 2)), (4, (4, 1))])
def test_a_checkpoint_of_two_ranks_goes_on_on_any_mesh(
    saved: Any, workers: Callable[[int], Any], size: int, mesh: tuple[int, int] | None
) -> None:
    folder, optimizer, expected = saved
    result = workers(size).run(resume, folder, "own", optimizer, mesh)[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=ROUNDING)
    assert_equal(result, expected, ROUNDING)


@pytest.mark.parametrize("size", [2, 4])
def test_an_fsdp2_checkpoint_loads_here(
    saved: Any, workers: Callable[[int], Any], size: int
) -> None:
    folder, optimizer, expected = saved
    result = workers(size).run(resume, folder, "fsdp2", optimizer, None)[0]
    assert result["extra"] == {}
    assert result["losses"] == pytest.approx(expected["losses"], rel=ROUNDING)
    assert_equal(result, expected, ROUNDING)


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp2_loads_our_checkpoint(saved: Any, workers: Callable[[int], Any], size: int) -> None:
    folder, optimizer, expected = saved
    losses = workers(size).run(resume_under_fsdp2, folder, optimizer)[0]
    assert losses == pytest.approx(expected["losses"], rel=ROUNDING)


def loaded(folder: Path, source: str, optimizer: str) -> State:
    """Everything that a checkpoint brings."""
    _, attached, engine = make_sshsdp(optimizer)
    engine.load(folder / source, attached)
    return {
        "model": engine.full_state_dict(),
        "optimizer": engine.full_optimizer_state_dict(attached),
    }


@pytest.mark.parametrize("source", ["own", "fsdp2"])
def test_a_number_of_ranks_that_divides_nothing_reads_the_same(
    saved: Any, workers: Callable[[int], Any], source: str
) -> None:
    folder, optimizer, _ = saved
    one, three = (workers(size).run(loaded, folder, source, optimizer)[0] for size in (1, 3))
    assert_equal(three, one, 0.0)


def described(path: Path) -> dict[str, Any]:
    """Every name in a checkpoint, with shape and dtype where it is a tensor."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in entries.items()
    }


def test_our_checkpoint_holds_what_fsdp2_s_holds(saved: Any) -> None:
    folder, optimizer, _ = saved
    ours, theirs = described(folder / "own"), described(folder / "fsdp2")
    assert ours == theirs
    assert len(ours) > 30 or optimizer == "plain sgd"


class Tied(nn.Module):
    """A head that is registered before the embedding whose weight it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(10, WIDTH)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens))).logsumexp(-1).mean()


def train_tied(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two steps, the same on all ranks."""
    losses = []
    for _ in range(2):
        loss = model(torch.arange(10))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def exchange_tied(folder: Path) -> dict[str, list[float]]:
    """A tied model trains here and under FSDP2, and each goes on from the other's checkpoint."""

    def ours() -> tuple[nn.Module, torch.optim.Optimizer, sshsdp.Engine]:
        torch.manual_seed(0)
        model = Tied()
        engine = sshsdp.shard(model, **OWN_DTYPES)
        return model, engine.attach(torch.optim.AdamW(model.parameters())), engine

    def theirs() -> tuple[nn.Module, torch.optim.Optimizer, State]:
        torch.manual_seed(0)
        model = Tied()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        train_tied(model, optimizer)
        states = get_state_dict(model, optimizer)
        return model, optimizer, dict(zip(("model", "optimizer"), states, strict=True))

    model, optimizer, engine = ours()
    train_tied(model, optimizer)
    engine.save(folder / "own", optimizer)
    losses = {"straight": train_tied(model, optimizer)}
    _, _, states = theirs()
    dcp.save(states, checkpoint_id=folder / "fsdp2")
    model, optimizer, engine = ours()
    engine.load(folder / "fsdp2", optimizer)
    losses["from fsdp2"] = train_tied(model, optimizer)
    model, optimizer, states = theirs()
    dcp.load(states, checkpoint_id=folder / "own")
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    losses["under fsdp2"] = train_tied(model, optimizer)
    return losses


def test_tied_weights_go_back_and_forth(tmp_path: Path, workers: Callable[[int], Any]) -> None:
    losses = workers(2).run(exchange_tied, tmp_path)[0]
    assert losses["from fsdp2"] == pytest.approx(losses["straight"], rel=ROUNDING)
    assert losses["under fsdp2"] == pytest.approx(losses["straight"], rel=ROUNDING)


def whole_round_trip(
    optimizer: str, model_state: State, optimizer_state: State, mesh: tuple[int, int] | None
) -> State:
    """Load whole states (rank 0's), and give them back."""
    _, attached, engine = make_sshsdp(optimizer, mesh)
    is_first = dist.get_rank() == 0
    engine.load_full_state_dict(model_state if is_first else {})
    engine.load_full_optimizer_state_dict(attached, optimizer_state if is_first else {})
    return {
        "model": engine.full_state_dict(),
        "optimizer": engine.full_optimizer_state_dict(attached),
    }


@pytest.mark.parametrize(("size", "mesh"), [(1, None), (2, None), (4, (2, 2))])
def test_whole_states_come_back_unchanged(
    saved: Any, workers: Callable[[int], Any], size: int, mesh: tuple[int, int] | None
) -> None:
    _, optimizer, expected = saved
    states = expected["model"], expected["optimizer"]
    result = workers(size).run(whole_round_trip, optimizer, *states, mesh)[0]
    assert_equal(result, expected, 0.0)


def test_plain_torch_loads_the_whole_optimizer_state(saved: Any) -> None:
    from tests.checkpoint.training import Odd, groups_of

    _, optimizer, expected = saved
    plain = OPTIMIZERS[optimizer](groups_of(Odd()))
    plain.load_state_dict(expected["optimizer"])
    for group in plain.param_groups:
        for parameter in group["params"]:
            for value in plain.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert value.shape == parameter.shape


def train_with_a_gap(folder: Path) -> tuple[list[float], list[float]]:
    """A layer is unused for two steps, so its step count lags; save, load elsewhere, go on."""
    model, attached, engine = make_sshsdp("adamw")
    train(model, attached, 0, 2)
    model.uses_all = False
    train(model, attached, 2, 4)
    engine.save(folder / "gap", attached)
    model.uses_all = True
    straight = train(model, attached, 4, 7)
    model, attached, engine = make_sshsdp("adamw")
    engine.load(folder / "gap", attached)
    return straight, train(model, attached, 4, 7)


def test_different_step_counts_survive_a_checkpoint(
    tmp_path: Path, workers: Callable[[int], Any]
) -> None:
    straight, resumed = workers(2).run(train_with_a_gap, tmp_path)[0]
    assert resumed == straight
