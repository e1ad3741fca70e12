"""Mistakes end in an error that names the parameter and says what to do; never in a hang.

Every case runs on two ranks with a short time limit; what each rank was told is compared.
"""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from tests.support.oddities import Chain, LowRank, Residual, Scaled

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHT = "blocks.0.linear.weight"


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain(Residual(), Residual())


def sharded(**policy: Any) -> tuple[nn.Module, sshsdp.Engine]:
    model = build()
    policy.setdefault("dtype", torch.float32)
    return model, sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(**policy))


def message_of(case: Callable[[], Any]) -> str:
    """What the error of a case says, with its class."""
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_all_told(
    workers: Callable[[int], Any], case: Callable[[], Any], *expected: str, size: int = 2
) -> None:
    for message in workers(size).run(message_of, case, timeout=30):
        for part in expected:
            assert part in message, f"{part!r} is not in: {message}"


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 8)).square().mean()


# Optimizers


def step_unattached() -> None:
    model, _ = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()


def step_unattached_built_before() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.float32))
    loss_of(model).backward()
    optimizer.step()


def step_detached() -> None:
    model, engine = sharded()
    optimizer = engine.attach(torch.optim.AdamW(model.parameters()))
    engine.detach(optimizer)
    loss_of(model).backward()
    optimizer.step()


@pytest.mark.parametrize("case", [step_unattached, step_unattached_built_before, step_detached])
def test_an_optimizer_that_is_not_attached_refuses_to_step(
    workers: Callable[[int], Any], case: Callable[[], Any]
) -> None:
    assert_all_told(workers, case, "RuntimeError", "'first.weight'", "engine.attach(optimizer)")


def attach_lbfgs() -> None:
    model, engine = sharded()
    engine.attach(torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_class_that_does_not_work_on_pieces_is_refused(
    workers: Callable[[int], Any],
) -> None:
    assert_all_told(
        workers, attach_lbfgs, "ValueError: LBFGS cannot train", "calls the model several times"
    )


def attach_foreign() -> None:
    model, engine = sharded()
    other = nn.Linear(3, 5)
    groups = [{"params": list(model.parameters())}, {"params": [other.bias, other.weight]}]
    engine.attach(torch.optim.SGD(groups, lr=0.1))


def attach_another_models() -> None:
    _, engine = sharded()
    model, _ = sharded()
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (attach_foreign, "param group 1, position 0: a tensor of shape (5,)"),
        (attach_another_models, "param group 0, position 0: a tensor of shape (8, 8)"),
    ],
)
def test_an_optimizer_with_parameters_from_elsewhere_is_refused(
    workers: Callable[[int], Any], case: Callable[[], Any], expected: str
) -> None:
    assert_all_told(workers, case, "ValueError", expected, "model.parameters()")


def attach_twice() -> None:
    model, engine = sharded()
    engine.attach(torch.optim.SGD(model.first.parameters(), lr=0.1))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_has_one_optimizer(workers: Callable[[int], Any]) -> None:
    assert_all_told(workers, attach_twice, "ValueError", "'first.weight'", "already")


def attach_other_groups_on_rank_1() -> None:
    model, engine = sharded()
    parameters = list(model.parameters())
    if dist.get_rank() == 1:
        parameters.reverse()
    engine.attach(torch.optim.SGD(parameters, lr=0.1))


def attach_fails_on_rank_1() -> None:
    model, engine = sharded()
    cls = torch.optim.LBFGS if dist.get_rank() == 1 else torch.optim.SGD
    engine.attach(cls(model.parameters(), lr=0.1))


def test_ranks_with_different_param_groups_are_all_told(workers: Callable[[int], Any]) -> None:
    assert_all_told(
        workers, attach_other_groups_on_rank_1, "RuntimeError: engine.attach()", "rank 1"
    )
    told = workers(2).run(message_of, attach_fails_on_rank_1, timeout=30)
    assert told[0].startswith("RuntimeError: engine.attach() failed on rank 1: ValueError: LBFGS")
    assert told[1].startswith("ValueError: LBFGS")


def step_inside_unsharded() -> None:
    model, engine = sharded()
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model).backward()
    before = [tensor.clone() for tensor in optimizer.param_groups[0]["params"]]
    try:
        with engine.unsharded():
            optimizer.step()
    finally:
        after = optimizer.param_groups[0]["params"]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        optimizer.step()
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_step_inside_unsharded_is_refused_before_it_changes_anything(
    workers: Callable[[int], Any],
) -> None:
    assert_all_told(workers, step_inside_unsharded, "RuntimeError", "engine.unsharded()")


# Reading and writing while sharded


def _weight() -> nn.Parameter:
    return sharded()[0].blocks[0].linear.weight


def _after_backward() -> nn.Module:
    model, engine = sharded()
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model).backward()
    return model


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "multiply": lambda weight: weight * 2,
    "multiply from the right": lambda weight: torch.ones(8, 8) * weight,
    "sum": lambda weight: weight.sum(),
    "norm": torch.linalg.vector_norm,
    "matmul": lambda weight: torch.ones(2, 8) @ weight,
    "stack": lambda weight: torch.stack([weight, weight]),
    "index": lambda weight: weight[0, 0],
    "assign": lambda weight: weight.__setitem__(0, 1.0),
    "data": lambda weight: weight.data,
    "set data": lambda weight: setattr(weight, "data", torch.ones(8, 8)),
    "detach": lambda weight: weight.detach(),
    "clone": lambda weight: weight.clone(),
    "item": lambda weight: weight.item(),
    "numpy": lambda weight: weight.numpy(force=True),
    "tolist": lambda weight: weight.tolist(),
    "fill": nn.init.zeros_,
    "copy into": lambda weight: weight.copy_(torch.ones(8, 8)),
    "copy from": lambda weight: torch.ones(8, 8).copy_(weight),
    "compare": lambda weight: weight == 0,
    "isnan": torch.isnan,
    "cast": lambda weight: weight.to(torch.float64),
    "half": lambda weight: weight.half(),
    "transpose": lambda weight: weight.T,
    "deepcopy": copy.deepcopy,
    "save": lambda weight: torch.save(weight, io.BytesIO()),
}


def read(way: str) -> None:
    weight = _weight()
    with torch.no_grad():
        READS[way](weight)


@pytest.mark.parametrize("way", READS)
def test_a_parameter_that_is_read_while_sharded_names_itself(
    workers: Callable[[int], Any], way: str
) -> None:
    assert_all_told(
        workers,
        _Call(read, way),
        "RuntimeError",
        f"parameter {WEIGHT!r} is sharded (unit 'blocks.0')",
        "engine.unsharded(",
    )


class _Call:
    """A function and its arguments, to be sent to workers."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __call__(self) -> Any:
        return self.function(*self.args)


MODEL_READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(build().state_dict()),
    "deepcopy": copy.deepcopy,
    "to another dtype": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "to another device": lambda model: model.to("meta"),
}


def read_model(way: str) -> None:
    MODEL_READS[way](sharded()[0])


@pytest.mark.parametrize("way", MODEL_READS)
def test_a_model_that_is_read_or_moved_while_sharded_names_a_parameter(
    workers: Callable[[int], Any], way: str
) -> None:
    assert_all_told(
        workers, _Call(read_model, way), "RuntimeError", "first.weight", "engine.unsharded("
    )


def look_at_metadata() -> None:
    model, _ = sharded()
    weight = model.blocks[0].linear.weight
    text = repr(weight)
    assert WEIGHT in text
    assert "(8, 8)" in text
    assert repr(model)
    assert (weight.ndim, weight.shape, weight.numel()) == (2, (8, 8), 64)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert len({weight, weight}) == 1
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert sum(p.numel() for p in model.parameters()) == 3 * 72 + 2 * 16


def test_names_shapes_and_the_like_can_be_asked_for_while_sharded(
    workers: Callable[[int], Any],
) -> None:
    assert_all_told(workers, look_at_metadata, "no error")


def read_gradient() -> None:
    _after_backward().blocks[0].linear.weight.grad.norm()


def clip_with_torch() -> None:
    torch.nn.utils.clip_grad_norm_(_after_backward().parameters(), 1.0)


def clip_values_with_torch() -> None:
    torch.nn.utils.clip_grad_value_(_after_backward().parameters(), 1.0)


@pytest.mark.parametrize("case", [read_gradient, clip_with_torch, clip_values_with_torch])
def test_reading_a_gradient_from_the_model_is_not_silent(
    workers: Callable[[int], Any], case: Callable[[], Any]
) -> None:
    assert_all_told(workers, case, "RuntimeError", "the gradient of ", "engine.clip_grad_norm_()")


def clip_without_optimizer() -> None:
    model, engine = sharded()
    loss_of(model).backward()
    engine.clip_grad_norm_(1.0)


def test_clipping_needs_an_attached_optimizer(workers: Callable[[int], Any]) -> None:
    assert_all_told(workers, clip_without_optimizer, "RuntimeError", "engine.attach(")


def clip_non_finite() -> None:
    model, engine = sharded()
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    scale = float("nan") if dist.get_rank() == 1 else 1.0
    (loss_of(model) * scale).backward()
    engine.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_gradient_that_is_not_finite_on_one_rank_is_told_to_all(
    workers: Callable[[int], Any],
) -> None:
    assert_all_told(workers, clip_non_finite, "RuntimeError", "not finite")


# A model that was changed


def add_module(model: nn.Module) -> None:
    model.blocks[1].extra = nn.Linear(8, 8)


def replace_module(model: nn.Module) -> None:
    model.blocks[1].linear = nn.Linear(8, 8)


def append_block(model: nn.Module) -> None:
    model.blocks.append(Residual())


def remove_block(model: nn.Module) -> None:
    del model.blocks[1]


def add_parameter(model: nn.Module) -> None:
    model.blocks[1].linear.register_parameter("scale", nn.Parameter(torch.ones(8)))


def replace_parameter(model: nn.Module) -> None:
    model.blocks[1].linear.weight = nn.Parameter(torch.ones(8, 8))


CHANGES = {
    add_module: "'blocks.1'",
    replace_module: "'blocks.1.linear",
    append_block: "'blocks'",
    remove_block: "'blocks'",
    add_parameter: "'blocks.1.linear'",
    replace_parameter: "'blocks.1.linear.weight'",
}

USES: dict[str, Callable[[nn.Module, sshsdp.Engine], Any]] = {
    "forward": lambda model, engine: loss_of(model),
    "attach": lambda model, engine: engine.attach(torch.optim.SGD(model.parameters(), lr=0.1)),
    "full_state_dict": lambda model, engine: engine.full_state_dict(),
    "load_full_state_dict": lambda model, engine: engine.load_full_state_dict({}),
}


def change_and_use(change: Callable[[nn.Module], None], use: str) -> None:
    model, engine = sharded()
    change(model)
    USES[use](model, engine)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_after_shard_is_noticed(
    workers: Callable[[int], Any], change: Callable[[nn.Module], None], use: str
) -> None:
    assert_all_told(
        workers, _Call(change_and_use, change, use), "RuntimeError", CHANGES[change], "shard"
    )


def unfreeze() -> None:
    model = build()
    model.blocks[0].linear.weight.requires_grad_(False)
    sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.float32))
    model.blocks[0].linear.weight.requires_grad_(True)
    loss_of(model)


def test_a_frozen_parameter_that_becomes_trainable_is_noticed(
    workers: Callable[[int], Any],
) -> None:
    assert_all_told(workers, unfreeze, "RuntimeError", WEIGHT, "requires_grad before")


# Ranks that differ


def shard_other_shape() -> None:
    model = build()
    if dist.get_rank() == 1:
        model.blocks[0].linear = nn.Linear(8, 6)
    sshsdp.shard(model)


def shard_other_dtype() -> None:
    model = build()
    if dist.get_rank() == 1:
        model.blocks[0].linear.double()
    sshsdp.shard(model)


def shard_other_trainability() -> None:
    model = build()
    model.blocks[0].linear.weight.requires_grad_(dist.get_rank() == 0)
    sshsdp.shard(model)


def shard_other_ties() -> None:
    model = build()
    if dist.get_rank() == 1:
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    sshsdp.shard(model)


def shard_other_depth() -> None:
    model = build()
    if dist.get_rank() == 1:
        model.blocks.append(Residual())
    sshsdp.shard(model)


def shard_other_buffers() -> None:
    model = build()
    model.register_buffer("table", torch.zeros(3 + dist.get_rank()))
    sshsdp.shard(model)


def shard_other_runtime() -> None:
    dtype = torch.float32 if dist.get_rank() else torch.bfloat16
    sshsdp.shard(build(), runtime=sshsdp.RuntimePolicy(dtype=dtype))


def shard_other_update() -> None:
    dtype = torch.float64 if dist.get_rank() else torch.float32
    sshsdp.shard(build(), update=sshsdp.UpdatePolicy(dtype=dtype))


def shard_other_units() -> None:
    sshsdp.shard(build(), units=("blocks.?",) if dist.get_rank() else ("blocks.0",))


def shard_other_units_by_class() -> None:
    sshsdp.shard(build(), units=(nn.Linear,) if dist.get_rank() else None)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (shard_other_shape, f"parameter {WEIGHT!r} of shape (8, 8)"),
        (shard_other_dtype, f"parameter {WEIGHT!r} of shape (8, 8), torch.float32"),
        (shard_other_trainability, f"parameter {WEIGHT!r}"),
        (shard_other_ties, f"parameter {WEIGHT!r}"),
        (shard_other_depth, "blocks.2"),
        (shard_other_buffers, "buffer 'table' of shape (3,)"),
        (shard_other_runtime, "the runtime policy"),
        (shard_other_update, "the update policy"),
        (shard_other_units, "the units"),
        (shard_other_units_by_class, "the units"),
    ],
)
def test_ranks_with_different_models_or_policies_are_all_told(
    workers: Callable[[int], Any], case: Callable[[], Any], expected: str
) -> None:
    assert_all_told(workers, case, "RuntimeError: sshsdp.shard()", expected, "rank 1", size=3)


def shard_wrong_on_rank_1() -> None:
    sshsdp.shard(build(), units=("no such",) if dist.get_rank() else None)


def test_a_mistake_on_one_rank_is_told_to_all(workers: Callable[[int], Any]) -> None:
    told = workers(2).run(message_of, shard_wrong_on_rank_1, timeout=30)
    assert told[1].startswith("ValueError: units: the pattern 'no such'")
    assert told[0] == f"RuntimeError: sshsdp.shard() failed on rank 1: {told[1]}"


# Arguments of shard


def shard_twice() -> None:
    model, _ = sharded()
    sshsdp.shard(model)


def shard_part_again() -> None:
    model, _ = sharded()
    sshsdp.shard(model.blocks)


def shard_around_sharded() -> None:
    model, _ = sharded()
    sshsdp.shard(nn.Sequential(nn.Linear(8, 8), model))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (shard_twice, "'first.weight'"),
        (shard_part_again, "'0.norm.weight'"),
        (shard_around_sharded, "'1.first.weight'"),
    ],
)
def test_a_second_shard_is_refused(
    workers: Callable[[int], Any], case: Callable[[], Any], name: str
) -> None:
    assert_all_told(workers, case, f"RuntimeError: parameter {name} is sharded already")


def shard_with(**options: Any) -> None:
    sshsdp.shard(build(), **options)


def _runtime(**options: Any) -> dict[str, Any]:
    return {"runtime": sshsdp.RuntimePolicy(**options)}


def _pack(*names: str, fuse: bool = False) -> sshsdp.Pack:
    return sshsdp.Pack(names, fuse=fuse)


def shard_unknown_format() -> None:
    shard_with(**_runtime(formats={"*.no_such": sshsdp.DenseFormat(torch.float32)}))


def shard_unknown_split() -> None:
    shard_with(update=sshsdp.UpdatePolicy(splits={"*.no_such": sshsdp.Split.equal(2)}))


def shard_unfit_split() -> None:
    splits = {"blocks.0.linear.weight": sshsdp.Split.sizes(3, 4)}
    shard_with(update=sshsdp.UpdatePolicy(splits=splits))


def shard_unknown_unit() -> None:
    shard_with(units=("blocks.*", "layers.*"))


def shard_unknown_unit_class() -> None:
    shard_with(units=(nn.Conv2d,))


def shard_unknown_pack() -> None:
    shard_with(**_runtime(packs=[_pack("linear.weight", "gate.weight")]))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (shard_unknown_format, "formats: the pattern '*.no_such' matches no name"),
        (shard_unknown_split, "splits: the pattern '*.no_such' matches no name"),
        (shard_unfit_split, "parameter 'blocks.0.linear.weight' of shape (8, 8): the parts (3, 4)"),
        (shard_unknown_unit, "units: the pattern 'layers.*' matches no name"),
        (shard_unknown_unit_class, "units: the model has no module of class Conv2d"),
        (shard_unknown_pack, "Pack('linear.weight', 'gate.weight'): no module of the model"),
    ],
)
def test_an_unknown_pattern_is_told_with_what_there_is(
    workers: Callable[[int], Any], case: Callable[[], Any], expected: str
) -> None:
    assert_all_told(workers, case, "ValueError", expected)


def pack_different_widths() -> None:
    model = Chain(LowRank())
    model.requires_grad_(True)
    packs = [_pack("left.weight", "right.weight")]
    sshsdp.shard(model, **_runtime(packs=packs))


def pack_different_ranks() -> None:
    shard_with(**_runtime(packs=[_pack("linear.weight", "linear.bias")]))


def pack_frozen_with_trainable() -> None:
    sshsdp.shard(Chain(LowRank()), **_runtime(packs=[_pack("linear.weight", "left.weight")]))


def pack_over_units() -> None:
    packs = [_pack("blocks.0.linear.weight", "blocks.1.linear.weight")]
    shard_with(**_runtime(packs=packs))


def pack_twice() -> None:
    packs = [_pack("norm.weight", "norm.bias"), _pack("linear.bias", "norm.bias")]
    shard_with(**_runtime(packs=packs))


def pack_scalars() -> None:
    model = Chain(Scaled())
    model.blocks[0].shift = nn.Parameter(torch.tensor(0.5))
    sshsdp.shard(model, **_runtime(packs=[_pack("scale", "shift")]))


def fuse_what_is_no_linear() -> None:
    packs = [_pack("norm.weight", "other.weight", fuse=True)]
    model = build()
    for block in model.blocks:
        block.other = nn.LayerNorm(8)
    sshsdp.shard(model, **_runtime(packs=packs))


def fuse_with_one_bias() -> None:
    packs = [_pack("linear.weight", "other.weight", fuse=True)]
    model = build()
    for block in model.blocks:
        block.other = nn.Linear(8, 8, bias=False)
    sshsdp.shard(model, **_runtime(packs=packs))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (pack_different_widths, "'blocks.0.right.weight'"),
        (pack_different_ranks, "'blocks.0.linear.bias'"),
        (pack_frozen_with_trainable, "requires_grad: 'blocks.0.linear.weight' has False"),
        (pack_over_units, "unit: 'blocks.0.linear.weight' has blocks.0"),
        (pack_twice, "'blocks.0.norm.bias' is in two packs"),
        (pack_scalars, "'blocks.0.scale' is 0-dimensional"),
        (fuse_what_is_no_linear, "'blocks.0.norm.weight'"),
        (fuse_with_one_bias, "blocks.0.linear.weight"),
    ],
)
def test_a_pack_that_cannot_be_is_told_by_name(
    workers: Callable[[int], Any], case: Callable[[], Any], expected: str
) -> None:
    assert_all_told(workers, case, "ValueError", expected)


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


def mesh_of_half_the_ranks() -> None:
    mesh = _mesh(2, 2, names=("replicate", "shard"))
    shard_with(mesh=mesh["shard"])


def mesh_with_other_names() -> None:
    shard_with(mesh=_mesh(2, 2, names=("dp", "tp")))


def mesh_the_other_way_round() -> None:
    shard_with(mesh=_mesh(2, 2, names=("shard", "replicate")))


def mesh_without_names() -> None:
    shard_with(mesh=_mesh(2, 2))


def mesh_of_three_dims() -> None:
    shard_with(mesh=_mesh(1, 2, 2, names=("pipe", "replicate", "shard")))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (mesh_of_half_the_ranks, "the mesh has 2 ranks and the world 4"),
        (mesh_with_other_names, "mesh_dim_names=('replicate', 'shard')"),
        (mesh_the_other_way_round, "mesh_dim_names=('replicate', 'shard')"),
        (mesh_without_names, "mesh_dim_names=('replicate', 'shard')"),
        (mesh_of_three_dims, "the mesh must be 1-D or 2-D"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    workers: Callable[[int], Any], case: Callable[[], Any], expected: str
) -> None:
    assert_all_told(workers, case, "ValueError", expected, size=4)


def shard_after_a_refusal(refused: Callable[[nn.Module], Any]) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert message_of(_Call(refused, model)) != "no error"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.float32))
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model).backward()
    optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    assert not any(torch.equal(value, before[name]) for name, value in after.items())


def _refuse_units(model: nn.Module) -> None:
    sshsdp.shard(model, units=("no such",))


def _refuse_pack(model: nn.Module) -> None:
    bad = _pack("linear.weight", "no.weight")
    sshsdp.shard(model, **_runtime(packs=[_pack("norm.weight", "linear.bias"), bad]))


def _refuse_fused_pack(model: nn.Module) -> None:
    model.blocks[0].other = nn.LayerNorm(8)
    packs = [_pack("norm.weight", "other.weight", fuse=True)]
    try:
        sshsdp.shard(model, **_runtime(packs=packs))
    finally:
        del model.blocks[0].other


@pytest.mark.parametrize("refused", [_refuse_units, _refuse_pack, _refuse_fused_pack])
def test_a_refused_shard_leaves_the_model_as_it_was(
    workers: Callable[[int], Any], refused: Callable[[nn.Module], Any]
) -> None:
    workers(2).run(shard_after_a_refusal, refused, timeout=30)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: sshsdp.RuntimePolicy(dtype=torch.int8), "floating-point dtype, got torch.int8"),
        (lambda: sshsdp.RuntimePolicy(prefetch=-1), "prefetch must be 0 or more, got -1"),
        (lambda: sshsdp.RuntimePolicy(formats={"*": torch.float32}), "must be a runtime format"),
        (lambda: sshsdp.UpdatePolicy(splits={"*": 2}), "must be a sshsdp.Split"),
        (lambda: sshsdp.UpdatePolicy(dtype=torch.int32), "UpdatePolicy.dtype"),
        (lambda: sshsdp.UpdatePolicy(reduce_dtype=torch.bool), "UpdatePolicy.reduce_dtype"),
        (lambda: sshsdp.UpdatePolicy(sharding="none"), "'hierarchical' or 'replicated'"),
        (lambda: sshsdp.UpdatePolicy(device="cuda"), "must be None or 'cpu', got 'cuda'"),
        (lambda: sshsdp.Pack(("a.weight",)), "two or more different names"),
        (lambda: sshsdp.Pack(("a.weight", "a.weight")), "two or more different names"),
        (lambda: sshsdp.Pack(("a", "b"), fuse=True), "names the weights of linear modules"),
        (lambda: sshsdp.register_optimizer(torch.optim.SGD, granularity="no"), "got 'no'"),
        (lambda: sshsdp.register_optimizer(nn.Linear, granularity="element"), "Linear"),
    ],
)
def test_a_policy_checks_itself(make: Callable[[], Any], expected: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert expected in str(caught.value)
