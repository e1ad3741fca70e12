"""``strategy="sshsdp"`` works under every name of Lightning, without an import of ours."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DistributedSampler

import lightning_sshsdp
from tests.support.interpreters import Interpreter, installed_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = Path(__file__).with_name("train_by_name.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the project's entry points are installed, as pip would."""
    return installed_environment(tmp_path_factory.mktemp("site"))


def _run(
    command: Sequence[str], environment: dict[str, str], executable: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _losses_of_one_process(shuffle: bool) -> list[float]:
    """Rank 0's losses when two ranks take two rows each, computed in one process."""
    x = torch.arange(16.0).reshape(8, 2) / 16
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    samplers = [DistributedSampler(x, 2, rank, shuffle=shuffle) for rank in (0, 1)]
    losses = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        rows = [torch.tensor(list(sampler)).split(2) for sampler in samplers]
        for batches in zip(*rows, strict=True):
            parts = [
                nn.functional.mse_loss(layer(x[batch]), x[batch].sum(1, keepdim=True))
                for batch in batches
            ]
            losses.append(parts[0].item())
            optimizer.zero_grad()
            (sum(parts) / 2).backward()
            optimizer.step()
    return losses


BASES = {
    "lightning": "lightning.pytorch.strategies.parallel",
    "lightning.pytorch": "lightning.pytorch.strategies.parallel",
    "pytorch_lightning": "pytorch_lightning.strategies.parallel",
    "lightning.fabric": "lightning.fabric.strategies.parallel",
    "lightning_fabric": "lightning_fabric.strategies.parallel",
}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


def _reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r"^\{.*\}$", output, re.MULTILINE)]


def _check_reports(reports: list[dict[str, Any]], names: list[str]) -> None:
    assert [report["name"] for report in reports] == names
    for report in reports:
        assert report["base"] == BASES[report["name"]]
        assert report["world_size"] == 2
        # The Trainer shuffles training data, Fabric takes the loader's order.
        wanted = _losses_of_one_process(shuffle="fabric" not in report["name"])
        assert_close(report["losses"], wanted, rtol=1e-5, atol=0)
        assert report["losses"][-1] < report["losses"][0]


@pytest.mark.parametrize(
    ("launcher", "names"), [(TORCHRUN, [*BASES]), ((), ["lightning"])], ids=["torchrun", "plain"]
)
def test_string_works_without_an_import(
    installed: dict[str, str], launcher: Sequence[str], names: list[str]
) -> None:
    done = _run([*launcher, str(SCRIPT), *names], installed)
    assert done.returncode == 0, done.stderr[-3000:]
    _check_reports(_reports(done.stdout), names)


@pytest.mark.parametrize("name", BASES)
def test_every_name_trains(interpreter: Interpreter, name: str) -> None:
    done = _run([str(SCRIPT), name], interpreter.environment, interpreter.executable)
    assert done.returncode == 0, done.stderr[-3000:]
    _check_reports(_reports(done.stdout), [name])


def test_without_autoload_an_import_registers_every_name(installed: dict[str, str]) -> None:
    code = """
import importlib
names = ["lightning", "lightning.pytorch", "pytorch_lightning", "lightning.fabric"]
packages = [importlib.import_module(name) for name in [*names, "lightning_fabric"]]
def strategies():
    for package in packages:
        make = getattr(package, "Trainer", None) or package.Fabric
        yield package, make(strategy="sshsdp", accelerator="cpu", devices=1).strategy
try:
    next(strategies())
except ValueError as error:
    assert "invalid strategy name" in str(error), error
    import lightning_sshsdp
    for package, strategy in strategies():
        assert type(strategy).__name__ == "SSHSDPStrategy"
        print(type(strategy).__module__)
"""
    done = _run(["-c", code], {**installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    flavours = [line.rpartition(".")[2] for line in done.stdout.splitlines() if "flavours" in line]
    expected = ["lightning_pytorch", "lightning_pytorch", "pytorch_lightning", "lightning_fabric"]
    assert flavours == [*expected, "standalone_fabric"], done.stderr[-3000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _torchrun_node(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    options = {"nnodes": 2, "node-rank": node, "nproc-per-node": 1}
    options |= {"master-addr": "127.0.0.1", "master-port": port}
    command = [f"--{name}={value}" for name, value in options.items()]
    return ["-m", "torch.distributed.run", *command], {}


def _slurm_task(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    return [], {
        "MASTER_PORT": str(port),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_NODELIST": "127.0.0.1",
    }


@pytest.mark.parametrize(
    ("launch", "environment"),
    [(_torchrun_node, "TorchElasticEnvironment"), (_slurm_task, "SLURMEnvironment")],
    ids=["torchrun", "slurm"],
)
def test_two_nodes_train_together(interpreter: Interpreter, launch: Any, environment: str) -> None:
    """Two machines are two launchers on one here; each starts one process."""
    port, names = _free_port(), ["lightning.pytorch", "lightning.fabric"]
    nodes = []
    for node in range(2):
        command, variables = launch(node, port)
        nodes.append(
            subprocess.Popen(
                [interpreter.executable, *command, str(SCRIPT), *names, "--nodes=2"],
                env={**interpreter.environment, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][1][-2000:] + outputs[1][1]
    reports = _reports(outputs[0][0])
    _check_reports(reports, names)
    for report in reports:
        assert report["environment"] == environment
        # Ranks of a node shard, nodes replicate.
        assert report["mesh"] == [2, 1]


def test_importing_torch_loads_neither_the_engine_nor_lightning(installed: dict[str, str]) -> None:
    code = (
        "import sys, torch; "
        "print(*(name in sys.modules for name in ('lightning_sshsdp', 'sshsdp', 'lightning')))"
    )
    done = _run(["-c", code], installed)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


@pytest.mark.parametrize(
    ("launcher", "rank"), [((), 0), ((), 1), (TORCHRUN, 1)], ids=["rank 0", "rank 1", "torchrun"]
)
def test_a_failing_rank_ends_the_job(
    interpreter: Interpreter, launcher: Sequence[str], rank: int
) -> None:
    started = time.monotonic()
    command = [*launcher, str(SCRIPT), "lightning", "--fail-rank", str(rank)]
    done = _run(command, interpreter.environment, interpreter.executable)
    assert done.returncode != 0
    assert "this rank fails" in done.stderr
    assert time.monotonic() - started < 60


def test_classes_of_both_families_are_distinct() -> None:
    import lightning.pytorch as pl

    assert issubclass(lightning_sshsdp.SSHSDPStrategy, pl.strategies.ParallelStrategy)
    from lightning_sshsdp.flavours import pytorch_lightning as other

    assert not issubclass(other.SSHSDPStrategy, pl.strategies.ParallelStrategy)


def test_unknown_attribute_is_an_attribute_error() -> None:
    name: Any = "SSHSDP"
    with pytest.raises(AttributeError, match="SSHSDP"):
        getattr(lightning_sshsdp, name)
