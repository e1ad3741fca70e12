"""The parts of a prediction against independent counts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sshsdp.assembly.format_choice import takes_mxfp8
from sshsdp.estimate.hardware import HARDWARE, find_hardware
from sshsdp.estimate.loading import load_model
from sshsdp.estimate.padding_table import SHARDS, markdown
from sshsdp.estimate.peers import dim0_padded_numel, lcm_padded_numel
from sshsdp.estimate.planning import plan_layout, specs_by_unit
from sshsdp.estimate.work import model_work
from sshsdp.layout import planner
from sshsdp.layout.cuts import Cuts, elements, rows
from sshsdp.policies import RuntimePolicy, UpdatePolicy

if TYPE_CHECKING:
    from sshsdp.parameters.slots import ParameterSlot

CONFIGS = Path(__file__).with_name("configs")
DOCS = Path(__file__).parents[2] / "docs"
MODELS = (
    "llama-3-8b",
    "llama-3-70b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "d5120-f13824",
    "d896-f4864",
)


def tiny_llama() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    values = json.loads((CONFIGS / "tiny-llama.json").read_text())
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    )


def test_operations_of_matrix_products_equal_the_counter_s() -> None:
    model = tiny_llama()
    tokens = torch.randint(0, 96, (2, 32))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    # The counter has no formula for fused attention on CPU, so it sees the matrix products alone.
    work = model_work(model)
    assert counter.get_total_flops() == 6 * sum(work.matmul_weights.values()) * tokens.numel()
    attention = 3 * 3 * 32 * 4 * (16 + 16) * tokens.numel()
    assert work.step_flops(32) * tokens.numel() == counter.get_total_flops() + attention


def test_activations_are_what_autograd_keeps() -> None:
    model = tiny_llama()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens = torch.randint(0, 96, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    predicted = model_work(model).activation_bytes(
        batch=2, sequence=64, itemsize=4, is_checkpointed=False
    )
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.15)


def test_experts_count_by_the_share_that_a_token_is_sent_to() -> None:
    work = model_work(load_model(str(CONFIGS / "tiny-moe.json")))
    attention = 64 * 64 + 2 * 32 * 64 + 64 * 64
    router = 8 * 64
    experts = 8 * 3 * 32 * 64
    assert work.matmul_weights["model.layers.0"] == attention + router + experts * 2 / 8
    # The head is tied to the embedding: multiplied with once, looked up once.
    assert work.matmul_weights["<root>"] == 96 * 64


FSDP2_SHAPES = [(896, 64), (128, 64), (5, 3), (1, 7), (100,), (9, 4, 4)]
FSDP2_SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

world_size, shapes = json.loads(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
model = torch.nn.Module()
for index, shape in enumerate(shapes):
    model.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(shape)))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
group = model._get_fsdp_state()._fsdp_param_group
print(json.dumps([p._sharded_param_data.numel() * world_size for p in group.fsdp_params]))
"""


@pytest.mark.parametrize("num_shards", [4, 6, 128])
def test_dim_0_padding_is_fsdp2_s(num_shards: int) -> None:
    argument = json.dumps([num_shards, FSDP2_SHAPES])
    done = subprocess.run(
        [sys.executable, "-c", FSDP2_SCRIPT, argument], capture_output=True, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured == [dim0_padded_numel(shape, num_shards) for shape in FSDP2_SHAPES]


def test_the_lcm_rule_gives_its_published_worst_cases() -> None:
    block = [(5120, 5120)] * 4 + [(13824, 5120)] * 2 + [(5120, 13824)]
    numel = sum(math.prod(shape) for shape in block)
    assert lcm_padded_numel(block, 1024) / numel - 1 == pytest.approx(0.339, abs=5e-4)
    # Chunks of 12 elements: rows of 6, 4, 4, 2 and 6.
    assert lcm_padded_numel([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5) == 60


@pytest.fixture(scope="module")
def table() -> str:
    pytest.importorskip("transformers")
    return markdown([str(DOCS / "configs" / f"{name}.json") for name in MODELS])


def test_the_table_in_the_docs_is_the_generated_one(table: str) -> None:
    page = (DOCS / "planning.md").read_text()
    rows, notes = table.split("\n\n")
    assert rows in page
    assert notes in page


def test_a_model_of_671b_parameters_is_planned_in_a_moment() -> None:
    pytest.importorskip("transformers")
    model = load_model(str(DOCS / "configs" / "deepseek-v3.json"))

    def cuts_of(slot: ParameterSlot, unit: str) -> Cuts:
        is_cut_by_rows = takes_mxfp8(slot, unit)
        return rows(slot.shape, 32, may_transpose=True) if is_cut_by_rows else elements()

    specs = specs_by_unit(model, RuntimePolicy(), cuts_of=cuts_of)
    assert len(specs) == 62
    planner._plan.cache_clear()
    started = time.process_time()
    layout = plan_layout(specs, num_replicas=8, num_shards=128, update=UpdatePolicy())
    # Measured: 0.1 s. The bound leaves room for a slow, busy machine.
    assert time.process_time() - started < 2
    assert layout.numel - layout.padding == 671_026_404_352


def padding_of(table: str) -> dict[tuple[str, str], list[float]]:
    """The table's lines, by model and rule."""
    found = {}
    name = ""
    for line in table.splitlines()[2:]:
        if line.startswith("|"):
            label, rule, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            name = label or name
            found[name, rule] = [float(cell.rstrip("%")) for cell in cells]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_cuts_between_rows_pad_less_than_one_percent(table: str, name: str) -> None:
    """But for the smallest block on 1,024 ranks, which has 16 rows for each."""
    found = padding_of(table)
    for rule in ("ours, anywhere", "ours, rows"):
        for num_shards, padding in zip(SHARDS, found[name, rule], strict=True):
            assert padding < 1 or (name, rule, num_shards) == ("d896-f4864", "ours, rows", 1024)
    for ours, theirs in (("ours, rows", "LCM of rows"), ("ours, 32 rows", "LCM of 32 rows")):
        pairs = zip(found[name, ours], found[name, theirs], strict=True)
        assert all(mine <= other for mine, other in pairs)


def test_blocks_that_pad_more_are_proved_minimal(table: str) -> None:
    """All but one, for which the bound (no padding at all) is out of reach of any order.

    Qwen3-30B-A3B on 128 ranks would need shards of exactly 99 x 49,152 elements without a gap;
    trying all orders and storage orders of its six matrices by hand finds none.
    """
    notes = [line for line in table.splitlines() if line.startswith("* ")]
    unproved = [note for note in notes if "no legal plan has less" not in note]
    assert len(notes) == 13
    assert [note.partition(":")[0] for note in unproved] == ["* qwen3-30b-a3b, 32 rows, S = 128"]


def test_an_axis_inside_a_node_is_fast_and_one_across_nodes_shares_adapters() -> None:
    h100 = HARDWARE["H100"]
    node, network, share = h100.node_bandwidth, h100.network_bandwidth, h100.link_efficiency
    assert h100.axis_bandwidth(8, 1) == node * share
    assert h100.axis_bandwidth(2, 4) == node * share
    # A ring over 16 nodes has all eight adapters of each; a replica group only its own.
    assert h100.axis_bandwidth(128, 1) == 8 * network * share
    assert h100.axis_bandwidth(16, 8) == network * share
    assert h100.axis_bandwidth(16, 4) == 2 * network * share


def test_hardware_files_extend_known_kinds(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "h200", "network_bandwidth": 25e9}))
    mine = find_hardware(str(path))
    assert mine.network_bandwidth == 25e9
    assert mine.memory_bytes == HARDWARE["H200"].memory_bytes
    assert find_hardware("b200") is HARDWARE["B200"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object is wanted, got list"),
        ('{"base": "Z80"}', "base must be one of H100"),
        ('{"name": "x"}', "missing"),
        ('{"base": "H100", "flops": 1}', "unexpected keyword argument 'flops'"),
        ('{"base": "H100", "dense_flops": 0}', "dense_flops must be positive, got 0"),
        ('{"base": "H100", "dense_flops": "fast"}', "dense_flops must be a number, got 'fast'"),
    ],
)
def test_wrong_hardware_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--hardware") as caught:
        find_hardware(str(path))
    assert message in str(caught.value)
