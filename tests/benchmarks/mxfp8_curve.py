"""Loss curves of one small decoder in MXFP8 and in bf16, on the King James Bible.

    python -m tests.benchmarks.mxfp8_curve --plot docs/images/mxfp8-loss.png

Two gloo ranks, the same weights and batches for both; characters are bytes. MXFP8 products are
emulated on a CPU: same values as the kernels', up to the order of sums.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import sshsdp
from examples.text import load_text
from tests.benchmarks.contenders import Decoder
from tests.benchmarks.measuring import join, run

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

WIDTH, NUM_LAYERS, VOCABULARY, LENGTH, BATCH = 128, 3, 256, 64, 4
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "MXFP8": {"dtype": torch.bfloat16, "format": "mxfp8"},
}


def _train(
    rank: int, port: int, name: str, num_steps: int, results: SimpleQueue[list[float]]
) -> None:
    world_size = join(rank, port)
    data = torch.frombuffer(bytearray(load_text("bible").encode()), dtype=torch.uint8)
    torch.manual_seed(0)
    model = Decoder(WIDTH, NUM_LAYERS, VOCABULARY)
    with torch.no_grad():
        # The head is tied to it.
        model.embedding.weight.mul_(0.02)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(**FORMATS[name]))
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        starts = torch.randint(0, len(data) - LENGTH, (world_size, BATCH), generator=generator)
        tokens = torch.stack([data[start : start + LENGTH] for start in starts[rank]]).long()
        loss = model(tokens)
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world_size)
    if rank == 0:
        results.put(losses)
    torch.distributed.destroy_process_group()


def _draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, losses in curves.items():
        axes.plot(losses, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(1.5, 4))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train twice, print the losses of the last 50 steps, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    curves = {name: run(_train, name, args.steps) for name in FORMATS}
    ends = {name: statistics.mean(losses[-50:]) for name, losses in curves.items()}
    for name, end in ends.items():
        sys.stdout.write(f"{name}: {end:.4f}, {end / ends['bf16'] - 1:+.2%}\n")
    if args.plot:
        _draw(curves, args.plot)


if __name__ == "__main__":
    main()
