"""``strategy="sshsdp"`` works under every name of Lightning, without an import of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DistributedSampler

import lightning_sshsdp

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
SCRIPT = HERE / "train_by_name.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the project's entry points are installed, as pip would."""
    site = tmp_path_factory.mktemp("site")
    info = site / "sshsdp_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sshsdp-under-test\nVersion: 0\n")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["torch.backends"]
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    paths = [str(site), str(PROJECT / "core"), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _run(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
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


@pytest.mark.parametrize(
    ("launcher", "names"),
    [(TORCHRUN, [*BASES]), ((), ["pytorch_lightning"]), ((), ["lightning.fabric"])],
    ids=["torchrun", "Trainer", "Fabric"],
)
def test_string_works_without_an_import(
    installed: dict[str, str], launcher: Sequence[str], names: list[str]
) -> None:
    done = _run([*launcher, str(SCRIPT), *names], installed)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)]
    assert [report["name"] for report in reports] == names
    for report in reports:
        assert report["base"] == BASES[report["name"]]
        assert report["world_size"] == 2
        # The Trainer shuffles training data, Fabric takes the loader's order.
        wanted = _losses_of_one_process(shuffle="fabric" not in report["name"])
        assert_close(report["losses"], wanted, rtol=1e-5, atol=0)
        assert report["losses"][-1] < report["losses"][0]


def test_without_autoload_an_import_registers(installed: dict[str, str]) -> None:
    code = """
import lightning.pytorch as pl
try:
    pl.Trainer(strategy="sshsdp", accelerator="cpu")
except ValueError as error:
    assert "invalid strategy name" in str(error), error
    import lightning_sshsdp
    strategy = pl.Trainer(strategy="sshsdp", accelerator="cpu", devices=1).strategy
    assert isinstance(strategy, lightning_sshsdp.SSHSDPStrategy)
    print("registered")
"""
    done = _run(["-c", code], {**installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.stdout.splitlines()[-1:] == ["registered"], done.stderr[-3000:]


def test_importing_torch_loads_neither_the_engine_nor_lightning(installed: dict[str, str]) -> None:
    code = (
        "import sys, torch; "
        "print(*(name in sys.modules for name in ('lightning_sshsdp', 'sshsdp', 'lightning')))"
    )
    done = _run(["-c", code], installed)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_ends_the_job(installed: dict[str, str], rank: int) -> None:
    started = time.monotonic()
    done = _run([str(SCRIPT), "lightning", "--fail-rank", str(rank)], installed)
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
