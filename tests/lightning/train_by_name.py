"""Run as a script: train with ``strategy="sshsdp"`` under some of Lightning's import names.

``train_by_name.py NAME... [--fail-rank RANK] [--nodes 2]``; never imports lightning_sshsdp itself.
Rank 0 prints a JSON line for each name, with what it saw.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--fail-rank", type=int)
    parser.add_argument("--nodes", type=int, default=1, help="of two processes in all")
    return parser.parse_args()


def _loader() -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.arange(16.0).reshape(8, 2) / 16
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)


def _train_with_trainer(package: Any, nodes: int, fail_rank: int | None) -> tuple[Any, list[float]]:
    import torch

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(2, 1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_rank == fail_rank and self.trainer.global_step == 1:
                raise RuntimeError("this rank fails")
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = package.Trainer(
        strategy="sshsdp",
        accelerator="cpu",
        devices=2 // nodes,
        num_nodes=nodes,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, _loader())
    return trainer.strategy, module.losses


def _train_with_fabric(package: Any, nodes: int) -> tuple[Any, list[float]]:
    import torch

    fabric = package.Fabric(
        strategy="sshsdp", accelerator="cpu", devices=2 // nodes, num_nodes=nodes
    )
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(_loader())
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return fabric.strategy, losses


def _train(name: str, nodes: int, fail_rank: int | None) -> None:
    package = importlib.import_module(name)
    if hasattr(package, "Trainer"):
        strategy, losses = _train_with_trainer(package, nodes, fail_rank)
    else:
        strategy, losses = _train_with_fabric(package, nodes)
    if strategy.global_rank == 0:
        base = next(cls for cls in type(strategy).__mro__ if cls.__name__ == "ParallelStrategy")
        report = {"name": name, "base": base.__module__, "losses": losses}
        report["world_size"] = strategy.world_size
        report["environment"] = type(strategy.cluster_environment).__name__
        report["mesh"] = list(strategy.device_mesh.shape)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Train and report."""
    arguments = _arguments()
    for name in arguments.names:
        _train(name, arguments.nodes, arguments.fail_rank)
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
