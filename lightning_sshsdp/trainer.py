"""The strategy for Lightning's Trainer, for either family of packages."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from datetime import timedelta  # noqa: TC003 (LightningCLI resolves annotations)
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout

import sshsdp  # noqa: TC001 (see above)
from lightning_sshsdp.checkpoint import CheckpointMixin
from lightning_sshsdp.environment import (
    StepWrapper,
    StrategyMixin,
    attach_optimizers,
    engine_of,
    unwrap_optimizer,
)
from lightning_sshsdp.finetuning import follow_finetuning
from lightning_sshsdp.precision import check_precision, share_scaler
from lightning_sshsdp.toggling import forward_toggles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning_sshsdp.family import Family

__all__ = ["TrainerStrategyMixin"]


class TrainerStrategyMixin(CheckpointMixin, StrategyMixin):
    """Everything of the Trainer strategy; a flavour adds ``ParallelStrategy`` as the last base."""

    def __init__(
        self,
        units: Sequence[type[nn.Module] | str] | Callable[[str, nn.Module], bool] | None = None,
        runtime: sshsdp.RuntimePolicy | Mapping[str, Any] | None = None,
        update: sshsdp.UpdatePolicy | Mapping[str, Any] | None = None,
        replicate_size: int | Literal["auto"] = "auto",
        shard_size: int | Literal["auto"] = "auto",
        checkpoint: Literal["sharded", "full"] = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        precision: Literal["mxfp8"] | None = None,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
    ) -> None:
        """Set the options; nothing is started yet.

        Args:
            units: What is gathered together: module classes, name patterns, or a callable
                ``(name, module) -> bool``. None: every child of every outermost ``nn.ModuleList``.
            runtime: How runtime parameters look: a ``sshsdp.RuntimePolicy``, or a mapping of some
                of its fields (dtypes by name), the rest following from the Trainer's ``precision``.
            update: How update parameters are kept: a ``sshsdp.UpdatePolicy`` or a mapping of its
                fields.
            replicate_size: Size of the mesh's ``replicate`` dimension (slow links). ``"auto"``: the
                number of nodes, or what ``shard_size`` leaves.
            shard_size: Size of the ``shard`` dimension (fast links). ``"auto"``: the rest of the
                world.
            checkpoint: ``"sharded"``: a directory that all ranks write, for any number of ranks to
                load. ``"full"``: one ordinary ``.ckpt`` file, assembled on rank 0.
            process_group_backend: Default: nccl on CUDA, gloo on CPU.
            timeout: For collectives of the default process group.
            precision: ``"mxfp8"``: linear layers of the repeated blocks in MXFP8; the rest is in
                the Trainer's ``precision``. ``Trainer(precision="mxfp8")`` is the same, with
                ``"bf16-mixed"`` for the rest.
            accelerator: As for any Lightning strategy; usually left to the Trainer.
            parallel_devices: Likewise.
            cluster_environment: Likewise.
            checkpoint_io: Likewise; only with ``checkpoint="full"``.
            precision_plugin: Likewise.
        """
        self._init_options(
            units=units,
            runtime=runtime,
            update=update,
            replicate_size=replicate_size,
            shard_size=shard_size,
            checkpoint=checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            precision=precision,
        )
        self._init_loading()
        self._check_checkpoint_io(checkpoint_io)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def _lightning_module(self) -> Any:
        return self.__dict__.get("_sharded_module")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # The Trainer hands the module over before it refuses compiled ones, without a way out.
        if getattr(module, "_compiler_ctx", None) is not None:
            raise RuntimeError(
                "a compiled LightningModule hides from the engine where each unit begins and ends: "
                "give the Trainer the plain module, and compile its units, for example "
                "`for block in self.model.blocks: block.compile()`"
            )
        self._sharded_module = module

    # Set-up

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who we are."""
        self._set_ranks()

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            launcher = self.family.trainer_name(
                "strategies.launchers.subprocess_script._SubprocessScriptLauncher"
            )
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh."""
        super().setup_environment()
        self._setup_process_group()
        # What LightningModule.device_mesh returns.
        self.lightning_module._device_mesh = self.device_mesh

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make modules on the meta device with ``empty_init``, else where the user says."""
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin; its clipping goes through the engine."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            check_precision(plugin)
            share_scaler(plugin)
            plugin.clip_grad_by_norm = self._clip_grad_by_norm
        self._precision_plugin = plugin

    def setup(self, trainer: Any) -> None:
        """Shard the module, unless it is; make and attach the optimizers when fitting."""
        self.accelerator.setup(trainer)
        _forbid_inference_mode(trainer)
        _refuse_callbacks(self.family, trainer.callbacks)
        module = self.lightning_module
        if engine_of(module) is None:
            if self._layer_sync is not None:
                module = self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
        self.shard_module().zero_grad()
        self.model = StepWrapper(module)
        forward_toggles(module)
        self._load_waiting_model_state()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            follow_finetuning(self, trainer.callbacks)
        self.setup_precision_plugin()

    def shard_module(self) -> sshsdp.Engine:
        """Shard the current LightningModule, unless it is. Collective."""
        return self._shard(self.lightning_module, self.precision_plugin)

    def model_to_device(self) -> None:
        """Nothing to do: the engine has moved everything."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers`` and point the optimizers at the update parameters."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        # ``configure_optimizers`` may return None; Lightning's stand-in has no groups.
        attach_optimizers(self.engine, [o for o in self.optimizers if o.param_groups])

    # Training

    def _clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.engine.clip_grad_norm_(clip_val, optimizer=unwrap_optimizer(optimizer))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate without reducing."""
        with self.engine.no_sync():
            yield

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a metric over ranks, in place."""
        return self._reduce(tensor, group, reduce_op)

    # The end

    def teardown(self) -> None:
        """Leave the module sharded and usable: evaluation, saving and another fit may follow.

        No collective is issued: the other ranks may have failed.
        """
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


# Callbacks that read and write whole parameters after every step, which would need them gathered
# and would round the masters to the runtime dtype.
_WHOLE_MODEL_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging")


def _refuse_callbacks(family: Family, callbacks: list[Any]) -> None:
    kinds = [family.trainer_name(f"callbacks.{name}") for name in _WHOLE_MODEL_CALLBACKS]
    for callback in callbacks:
        if isinstance(callback, tuple(kinds)):
            raise RuntimeError(
                f"{type(callback).__name__} averages whole parameters, and the strategy shards "
                "them: use lightning_sshsdp.WeightAveraging, which averages the shards"
            )


def _forbid_inference_mode(trainer: Any) -> None:
    # Parameters gathered under inference mode are inference tensors, which no later fit can train.
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
