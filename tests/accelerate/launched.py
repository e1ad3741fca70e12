"""A program for `accelerate launch`: an ordinary loop, whose findings rank 0 writes to a file.

Usage: launched.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accelerate_sshsdp import Accelerator, engine_of
from tests.accelerate.models import dataset, llama


def main(folder: Path) -> None:
    """Train, save, and go on from there with new objects."""
    accelerator = Accelerator()
    assert "ACCELERATE_USE_FSDP" not in os.environ

    def prepare() -> tuple:
        torch.manual_seed(0)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return accelerator.prepare(model, optimizer, DataLoader(dataset("llama", 16), 2))

    def train(start: int, stop: int) -> list[float]:
        losses = []
        for batch in accelerator.skip_first_batches(batches, start):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if start + len(losses) == stop:
                break
        return losses

    model, optimizer, batches = prepare()
    train(0, 2)
    accelerator.save_state(folder / "state")
    losses = train(2, 4)
    accelerator.free_memory()
    model, optimizer, batches = prepare()
    accelerator.load_state(folder / "state")
    resumed = train(2, 4)
    if accelerator.is_main_process:
        plugin = {name: str(value) for name, value in vars(accelerator.sshsdp_plugin).items()}
        found = {
            "plugin": plugin,
            "mesh": accelerator.sshsdp_mesh.shape,
            "precision": accelerator.mixed_precision,
            "processes": accelerator.num_processes,
            "device": str(accelerator.device),
            "prefetch": engine_of(model).runtime.prefetch,
            "losses": losses,
            "resumed": resumed,
        }
        (folder / "found.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
