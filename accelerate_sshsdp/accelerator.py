"""`Accelerator`: Hugging Face Accelerate's, with models sharded by the engine.

Example:
    >>> from accelerate_sshsdp import Accelerator  # doctest: +SKIP
    >>> accelerator = Accelerator(mixed_precision="bf16")  # doctest: +SKIP
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

from accelerate_sshsdp.checkpoints import CheckpointsMixin
from accelerate_sshsdp.environment import (
    check_world,
    drop_carriers,
    ensure_process_group,
    find_precision,
    refuse_other_plugins,
    take_parallelism,
    wants_cpu,
)
from accelerate_sshsdp.exports import ExportsMixin, export_by_save_pretrained
from accelerate_sshsdp.gradients import GradientsMixin
from accelerate_sshsdp.optimizers import attach, refers_to, unwrap_optimizer, watch_unattached
from accelerate_sshsdp.plugin import SSHSDPPlugin
from accelerate_sshsdp.scaler import GlobalGradScaler
from accelerate_sshsdp.sharding import engine_of, make_mesh, shard_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    import sshsdp

__all__ = ["Accelerator"]

logger = logging.getLogger(__name__)


class Accelerator(GradientsMixin, CheckpointsMixin, ExportsMixin, accelerate.Accelerator):
    """Drop-in ``accelerate.Accelerator`` whose models are sharded by SS-HSDP.

    ``prepare`` shards models in place and returns them; optimizers keep their identity, and their
    param groups are pointed at the update parameters as soon as both have been prepared, in
    whatever order. Dataloaders are divided over all ranks.

    Args:
        *args: As for ``accelerate.Accelerator``.
        sshsdp_plugin: How to shard; default: ``SSHSDPPlugin()``, which reads the environment and
            the configuration file.
        **kwargs: As for ``accelerate.Accelerator``. ``mixed_precision`` is one of no, fp16, bf16,
            mxfp8 (linear layers of the units in MXFP8, the rest in bf16). A ``parallelism_config``
            may give the sizes of the mesh.

    Raises:
        ValueError: Another sharding plugin is asked for, in an argument or by the environment; or
            the precision is not supported.
        RuntimeError: There are several processes, and Accelerate's state knows of one only.
    """

    def __init__(
        self, *args: Any, sshsdp_plugin: SSHSDPPlugin | None = None, **kwargs: Any
    ) -> None:
        """See the class."""
        signature = inspect.signature(accelerate.Accelerator.__init__)
        arguments = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        del arguments["self"]
        refuse_other_plugins(arguments)
        fields: dict[str, Any] = take_parallelism(arguments.pop("parallelism_config", None))
        if (precision := find_precision(arguments.get("mixed_precision"))) == "mxfp8":
            fields["runtime_format"], precision = "mxfp8", "bf16"
        arguments["mixed_precision"] = precision
        if sshsdp_plugin is not None and not isinstance(sshsdp_plugin, SSHSDPPlugin):
            raise TypeError(f"sshsdp_plugin must be a SSHSDPPlugin, got {sshsdp_plugin!r}")
        self.sshsdp_plugin = copy.copy(sshsdp_plugin or SSHSDPPlugin())
        vars(self.sshsdp_plugin).update(fields)
        if not arguments.get("cpu") and wants_cpu():
            arguments["cpu"] = True
        drop_carriers()
        super().__init__(**arguments)
        check_world(self.num_processes)
        self._take_over_scaling()
        self._mesh: DeviceMesh | None = None
        self._waits_to_attach = False

    def _take_over_scaling(self) -> None:
        if self.mixed_precision != "fp16":
            return
        handler = self.scaler_handler
        options = handler.to_kwargs() if handler is not None else {}
        self.native_amp = True
        self.scaler = GlobalGradScaler(device=self.device.type, **options)

    # Engines

    @property
    def engines(self) -> list[sshsdp.Engine]:
        """The engines of the prepared models, in order of preparation."""
        engines = [engine_of(model) for model in self._models]
        return [engine for engine in engines if engine is not None]

    @property
    def sshsdp_mesh(self) -> DeviceMesh:
        """The mesh: ``("shard",)``, or ``("replicate", "shard")``. The first use is collective."""
        if self._mesh is None:
            ensure_process_group()
            self._mesh = make_mesh(self.sshsdp_plugin, self.device.type)
        return self._mesh

    @contextlib.contextmanager
    def unsharded(self, model: nn.Module, writes: bool = False) -> Iterator[None]:
        """Have a prepared model's parameters whole, on every rank, inside the context.

        Ranks may then run the model, or generate, as unevenly as they like. Collective on entry.

        Args:
            model: Prepared.
            writes: Take over changes that all ranks have made alike.
        """
        engine = engine_of(model)
        with contextlib.nullcontext() if engine is None else engine.unsharded(writes=writes):
            yield

    # Preparation

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in Accelerate; models, optimizers, dataloaders and schedulers in any grouping."""
        self._waits_to_attach = True
        try:
            result = super().prepare(*args, device_placement=device_placement)
        finally:
            self._waits_to_attach = False
        self._attach_optimizers()
        return result

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard a model in place. Collective.

        Args:
            model: On any device, meta included. It comes back as the same object.
            device_placement: The engine places models; it is ignored.
            evaluation_mode: Makes no difference: a model that is only evaluated is sharded too, and
                may be trained later.
        """
        if any(model is one for one in self._models):
            return model
        if engine_of(model) is None and not getattr(model, "_is_accelerate_prepared", False):
            if self.verify_device_map(model):
                raise ValueError(
                    "a model that was loaded with device_map='auto' is spread over devices already "
                    "and cannot be sharded: load it without a device_map"
                )
            engine = shard_model(
                model, self.sshsdp_plugin, self.sshsdp_mesh, self.device, self.mixed_precision
            )
            self._compile_units(engine)
            export_by_save_pretrained(model, engine)
        with self._without_compilation():
            # With evaluation_mode, Accelerate does everything but wrap the model for DDP.
            model = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        self._attach_optimizers()
        return model

    @contextlib.contextmanager
    def _without_compilation(self) -> Iterator[None]:
        kept = self.state.dynamo_plugin
        self.state.dynamo_plugin = TorchDynamoPlugin(backend=DynamoBackend.NO)
        try:
            yield
        finally:
            self.state.dynamo_plugin = kept

    def _compile_units(self, engine: sshsdp.Engine) -> None:
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            return
        options = plugin.to_kwargs()
        options.pop("use_regional_compilation", None)
        for unit in engine.units:
            if not unit.is_root:
                unit.module.compile(**options)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Wrap an optimizer and point it at the update parameters, now or with its model.

        Args:
            optimizer: Made from the parameters of one model, prepared or not.
            device_placement: The engine places optimizer state; it is ignored.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        watch_unattached(unwrap_optimizer(prepared), self)
        self._attach_optimizers()
        return prepared

    def _attach_optimizers(self) -> None:
        """Attach the optimizers whose model is there. Collective."""
        if self._waits_to_attach:
            return
        optimizers = [unwrap_optimizer(one) for one in self._optimizers]
        owner = {slot.parameter: engine for engine in self.engines for slot in engine.slots}
        for engine in self.engines:
            mine = [one for one in optimizers if engine in refers_to(one, owner)]
            attach(engine, mine)

    # The end

    def free_memory(self, *objects: Any) -> Any:
        """Forget all prepared objects, drop gradients, and the state of optimizers given here.

        Models stay sharded and usable, and may be prepared again.
        """
        given = [unwrap_optimizer(o) for o in objects if isinstance(o, torch.optim.Optimizer)]
        for engine in self.engines:
            engine.zero_grad()
            for optimizer in engine.optimizers:
                if any(optimizer is one for one in given):
                    engine.detach(optimizer)
        return super().free_memory(*objects)
