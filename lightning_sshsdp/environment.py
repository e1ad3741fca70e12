"""What the Trainer strategy and the Fabric strategy share: options, processes, mesh and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sshsdp
from lightning_sshsdp.options import mesh_sizes, runtime_policy, update_policy
from lightning_sshsdp.precision import asks_for_mxfp8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

    from lightning_sshsdp.family import Family

__all__ = [
    "StepWrapper",
    "StrategyMixin",
    "attach",
    "attach_optimizers",
    "engine_of",
    "engine_of_wrapper",
    "unwrap_optimizer",
]

_ENGINE_ATTRIBUTE = "_sshsdp_engine"


def engine_of(module: nn.Module) -> sshsdp.Engine | None:
    """The engine that shards a module, if a strategy has sharded it."""
    engine: sshsdp.Engine | None = module.__dict__.get(_ENGINE_ATTRIBUTE)
    return None if engine is None or engine.is_closed else engine


class StrategyMixin:
    """Comes before a family's ``ParallelStrategy`` in the bases of a strategy.

    The attributes and properties that start with ``parallel_devices``, ``cluster_environment``,
    ``local_rank`` and the like are Lightning's.
    """

    family: ClassVar[Family]

    def _init_options(
        self,
        *,
        units: Any,
        runtime: sshsdp.RuntimePolicy | Mapping[str, Any] | None,
        update: sshsdp.UpdatePolicy | Mapping[str, Any] | None,
        replicate_size: int | Literal["auto"],
        shard_size: int | Literal["auto"],
        checkpoint: Literal["sharded", "full"],
        process_group_backend: str | None,
        timeout: timedelta | None,
        precision: Literal["mxfp8"] | None,
    ) -> None:
        if checkpoint not in ("sharded", "full"):
            raise ValueError(f"checkpoint must be 'sharded' or 'full', got {checkpoint!r}")
        if precision not in (None, "mxfp8"):
            raise ValueError(
                f"precision of the sshsdp strategy must be 'mxfp8' or left out, got {precision!r}: "
                "every other precision is given to the Trainer or to Fabric"
            )
        self._quantizes = precision == "mxfp8"
        # Wrong fields are reported where the strategy is made, not after the processes have
        # started.
        runtime_policy(runtime, "32-true", nn.Module(), quantizes=self._quantizes)
        update_policy(update, "32-true")
        self._units = units
        self._runtime = runtime
        self._update = update
        self._replicate_size = replicate_size
        self._shard_size = shard_size
        self._checkpoint_format = checkpoint
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._num_nodes = 1
        self._device_mesh: DeviceMesh | None = None

    # Processes

    @property
    def is_distributed(self) -> bool:
        """Lightning asks before it injects samplers and reduces metrics."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank sees other data, whatever the mesh."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _set_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

        rank_zero_only = self.family.fabric_name("utilities.rank_zero.rank_zero_only")
        rank_zero_only.rank = utilities_rank_zero_only.rank = self.global_rank

    def _setup_process_group(self) -> None:
        fabric = self.family.fabric_name
        fabric("utilities.seed.reset_seed")()
        self._set_ranks()
        device = self.root_device
        if self._process_group_backend is None:
            self._process_group_backend = fabric(
                "utilities.distributed._get_default_process_group_backend_for_device"
            )(device)
        fabric("utilities.distributed._init_dist_connection")(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        if self._device_mesh is None:
            self._device_mesh = self._make_mesh()

    def _make_mesh(self) -> DeviceMesh:
        replicate, shard = mesh_sizes(
            self._replicate_size, self._shard_size, dist.get_world_size(), self.num_nodes
        )
        if replicate == 1:
            return init_device_mesh(self.root_device.type, (shard,), mesh_dim_names=("shard",))
        return init_device_mesh(
            self.root_device.type, (replicate, shard), mesh_dim_names=("replicate", "shard")
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh: ``("shard",)``, or ``("replicate", "shard")``.

        Raises:
            RuntimeError: The processes have not been initialised yet.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "the device mesh exists once the processes are initialised, not before"
            )
        return self._device_mesh

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not self._is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s object, on every rank."""
        if not self._is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            sync = self.family.fabric_name("utilities.distributed._sync_ddp_if_available")
            return sync(tensor, group, reduce_op=reduce_op)
        return tensor

    @staticmethod
    def _is_initialized() -> bool:
        return dist.is_available() and dist.is_initialized()

    # Checkpoints

    def _check_checkpoint_io(self, checkpoint_io: Any) -> None:
        if checkpoint_io is not None and self._checkpoint_format == "sharded":
            raise ValueError(
                "a CheckpointIO plugin writes single files: give the strategy checkpoint='full' to "
                "use one"
            )

    @property
    def checkpoint_io(self) -> Any:
        """Reads and writes single files."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._check_checkpoint_io(checkpoint_io)
        self._checkpoint_io = checkpoint_io

    # Engines

    def _shard(self, module: nn.Module, plugin: Any) -> sshsdp.Engine:
        """Shard a module, or find that it is sharded as this strategy wants it."""
        quantizes = self._quantizes or asks_for_mxfp8(plugin)
        runtime = runtime_policy(self._runtime, plugin.precision, module, quantizes=quantizes)
        update = update_policy(self._update, plugin.precision)
        engine = engine_of(module)
        if engine is not None:
            self._check_same(engine, runtime, update)
            return engine
        _move_modules_without_parameters(module, self.root_device)
        engine = sshsdp.shard(
            module,
            self.device_mesh,
            self._units,
            runtime=runtime,
            update=update,
            device=self.root_device,
        )
        module.__dict__[_ENGINE_ATTRIBUTE] = engine
        self.family.fabric_name("utilities.device_dtype_mixin._update_properties")(
            module, device=self.root_device
        )
        return engine

    def _check_same(
        self, engine: sshsdp.Engine, runtime: sshsdp.RuntimePolicy, update: sshsdp.UpdatePolicy
    ) -> None:
        old = (engine.runtime, engine.update, engine.topology.mesh.mesh.tolist())
        new = (runtime, update, self.device_mesh.mesh.tolist())
        if old != new:
            raise RuntimeError(
                f"the module is sharded already, with {old}, and now {new} is asked for: use the "
                "same precision and options, or call strategy.engine.close() on all ranks first"
            )


def _move_modules_without_parameters(module: nn.Module, device: torch.device) -> None:
    # The engine moves parameters and buffers; metrics keep tensors that are neither.
    for submodule in module.modules():
        if next(submodule.parameters(), None) is None and submodule is not module:
            submodule.to(device)


def attach_optimizers(engine: sshsdp.Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let the engine's optimizers be ``optimizers``: attach new ones, detach those of earlier runs.

    Raises:
        ValueError: An optimizer does not train the engine's model, or cannot.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS needs dot products over all parameters, which no rank has here: use another "
                "optimizer, or another strategy"
            )
    for optimizer in engine.optimizers:
        if not any(optimizer is kept for kept in optimizers):
            engine.detach(optimizer)
    known = engine.optimizers
    attach(engine, [o for o in optimizers if not any(o is one for one in known)])


def attach(engine: sshsdp.Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Attach optimizers, and keep their own ``state_dict`` methods from being used by mistake."""

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is one for one in engine.optimizers):
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds flat pieces of the state, other ones on "
                "each rank: save and load it with the Trainer or Fabric, or call, on all ranks, "
                "engine.full_optimizer_state_dict(optimizer) and "
                "engine.load_full_optimizer_state_dict(optimizer, state)"
            )

    engine.attach(optimizers)
    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(refuse)
        optimizer.register_load_state_dict_pre_hook(refuse)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner


class StepWrapper(nn.Module):
    """Stands for a sharded module, so that Lightning sends step methods through its ``__call__``.

    The engine gathers the root unit when the module is called. Lightning calls a step method
    directly unless the strategy's model is another object than the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``."""
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


def engine_of_wrapper(module: nn.Module) -> sshsdp.Engine:
    """The engine behind what Fabric's ``setup_module`` returned.

    Raises:
        ValueError: It was not set up.
    """
    inner = module.module if isinstance(module, StepWrapper) else module
    engine = engine_of(inner)
    if engine is None:
        raise ValueError(
            f"this {type(inner).__name__} is not sharded: set it up with fabric.setup() first"
        )
    return engine
