"""Loading takes a rank's shards and a tensor: measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

PROGRAM = Path(__file__).with_name("pretrained_memory.py")


def save(folder: Path, *, width: int, layers: int, vocabulary: int) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_host_memory_is_shards_and_one_tensor(tmp_path: Path) -> None:
    """Every rank held the model, or twice that for a while: huggingface/transformers#43749,
    huggingface/accelerate#3482.
    """
    small = save(tmp_path / "small", width=16, layers=1, vocabulary=64)
    # 152 MB in fp32, of which the largest tensor has 16 MB.
    large = save(tmp_path / "large", width=512, layers=7, vocabulary=8192)
    assert 140e6 < (large / "model.safetensors").stat().st_size < 160e6
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, small, large, tmp_path / "store", str(rank), "2"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=80)
        assert process.returncode == 0
        found = json.loads(output.splitlines()[-1])
        bound = 1.1 * (found["shards"] + found["largest"])
        # The shards are there in the end: the measurement sees them.
        assert 0.9 * found["shards"] < found["grown"] <= bound, found
