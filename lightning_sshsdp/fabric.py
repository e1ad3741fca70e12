"""The strategy for Lightning Fabric, for either family of packages."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta  # noqa: TC003 (LightningCLI resolves annotations)
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.constants import default_pg_timeout

import sshsdp  # noqa: TC001 (see above)
from lightning_sshsdp.environment import (
    StepWrapper,
    StrategyMixin,
    attach,
    attach_optimizers,
    engine_of_wrapper,
)
from lightning_sshsdp.fabric_checkpoint import FabricCheckpointMixin
from lightning_sshsdp.precision import check_precision, share_scaler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["FabricStrategyMixin"]


class FabricStrategyMixin(FabricCheckpointMixin, StrategyMixin):
    """Everything of the Fabric strategy; a flavour adds ``ParallelStrategy`` as the last base."""

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
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision: Literal["mxfp8"] | Any | None = None,
    ) -> None:
        """Set the options; nothing is started yet.

        Args:
            units: What is gathered together: module classes, name patterns, or a callable
                ``(name, module) -> bool``. None: every child of every outermost ``nn.ModuleList``.
            runtime: How runtime parameters look: a ``sshsdp.RuntimePolicy``, or a mapping of some
                of its fields (dtypes by name), the rest following from Fabric's ``precision``.
            update: How update parameters are kept: a ``sshsdp.UpdatePolicy`` or a mapping of its
                fields.
            replicate_size: Size of the mesh's ``replicate`` dimension (slow links). ``"auto"``: the
                number of nodes, or what ``shard_size`` leaves.
            shard_size: Size of the ``shard`` dimension (fast links). ``"auto"``: the rest of the
                world.
            checkpoint: ``"sharded"``: a directory that all ranks write, for any number of ranks to
                load. ``"full"``: one ordinary file, assembled on rank 0.
            process_group_backend: Default: nccl on CUDA, gloo on CPU.
            timeout: For collectives of the default process group.
            accelerator: As for any Lightning strategy; usually left to Fabric.
            parallel_devices: Likewise.
            cluster_environment: Likewise.
            checkpoint_io: Likewise; only with ``checkpoint="full"``.
            precision: ``"mxfp8"``: linear layers of the repeated blocks in MXFP8; the rest is in
                Fabric's ``precision``. ``Fabric(precision="mxfp8")`` is the same, with
                ``"bf16-mixed"`` for the rest. Or a precision plugin, usually left to Fabric.
        """
        quantizes = isinstance(precision, str)
        self._init_options(
            units=units,
            runtime=runtime,
            update=update,
            replicate_size=replicate_size,
            shard_size=shard_size,
            checkpoint=checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            precision=precision if quantizes else None,
        )
        self._check_checkpoint_io(checkpoint_io)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=None if quantizes else precision,
        )
        self._engines: list[sshsdp.Engine] = []
        self._backward_sync_control = _BackwardSync()

    # Set-up

    def _set_world_ranks(self) -> None:
        self._set_ranks()

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            launcher = self.family.fabric_name(
                "strategies.launchers.subprocess_script._SubprocessScriptLauncher"
            )
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Start the process group and make the mesh."""
        super().setup_environment()
        self._setup_process_group()

    @property
    def precision(self) -> Any:
        """Lightning's precision plugin."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            check_precision(plugin)
            share_scaler(plugin)
        self._precision = plugin

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules on the meta device with ``empty_init``, else where the user says."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing to do: the engine moves what it shards."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module. Collective."""
        engine = self._shard(module, self.precision)
        if not any(engine is known for known in self._engines):
            self._engines.append(engine)
        return StepWrapper(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard a module and point its optimizers at the update parameters. Collective."""
        wrapper = self.setup_module(module)
        attach_optimizers(engine_of_wrapper(wrapper), optimizers)
        return wrapper, optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Point an optimizer at the update parameters of the module that it trains. Collective.

        Raises:
            ValueError: It trains no module that was set up, or several at once.
        """
        engine = self._engine_of_optimizer(optimizer)
        if engine is None:
            raise ValueError(
                f"{type(optimizer).__name__} trains no module that this Fabric has set up: call "
                "fabric.setup_module(model) first, and build the optimizer from that model's "
                "parameters()"
            )
        if not any(optimizer is attached for attached in engine.optimizers):
            attach(engine, [optimizer])
        return optimizer

    def _engine_of_optimizer(self, optimizer: torch.optim.Optimizer) -> sshsdp.Engine | None:
        for engine in self._engines:
            if any(optimizer is attached for attached in engine.optimizers):
                return engine
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for engine in self._engines:
            if not held.isdisjoint(engine.model.parameters()):
                return engine
        return None

    # Training

    def all_reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Any:
        """Reduce a tensor over ranks, in place."""
        return self._reduce(tensor, group, reduce_op)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the norm of an optimizer's gradients over all ranks."""
        self.precision.unscale_gradients(optimizer)
        return engine_of_wrapper(module).clip_grad_norm_(
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            optimizer=optimizer,
        )


class _BackwardSync:
    """Fabric's handle for accumulation without reductions."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Accumulate if ``enabled``; the state before is restored on exit in any case."""
        engine = engine_of_wrapper(module)
        return engine.no_sync() if enabled else nullcontext()
