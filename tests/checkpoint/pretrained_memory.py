"""Program of one rank: load a model and print the growth of its anonymous memory and its bounds.

Anonymous memory is what the process has to pay for; pages of mapped files are the kernel's to drop.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import sshsdp


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


class Peak(threading.Thread):
    """Samples anonymous memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = anonymous_bytes()
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.highest = max(self.highest, anonymous_bytes())
            time.sleep(0.001)


def main(small: str, folder: str, store: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    cls = transformers.LlamaForCausalLM
    # Imports, pools of threads and caches are not the model's.
    sshsdp.from_pretrained(cls, small)
    before = anonymous_bytes()
    peak = Peak()
    peak.start()
    _, engine = sshsdp.from_pretrained(cls, folder)
    peak.is_over = True
    peak.join()
    shards = sum(
        space.update_shard.nbytes + space.layout.shard_numel * space.runtime_dtype.itemsize
        for space in engine.spaces
    )
    largest = max(value.numel() * 4 for value in engine.model.parameters())
    print(json.dumps({"grown": peak.highest - before, "shards": shards, "largest": largest}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
