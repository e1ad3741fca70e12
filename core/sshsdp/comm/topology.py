"""The process groups of a mesh, and this rank's place in it.

Gathers and reductions speak over process groups of their own: the order of the gathers is the same
on every rank and so is the order of the reductions, but how the two interleave may differ when
ranks use different parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sshsdp.comm.collectives import Collectives

if TYPE_CHECKING:
    from sshsdp.comm.collectives import WireBytes
    from sshsdp.policies import UpdatePolicy

__all__ = ["Topology", "mesh_sizes", "resolve_mesh"]

REPLICATE, SHARD = "replicate", "shard"


def resolve_mesh(mesh: DeviceMesh | None, device: torch.device | None) -> DeviceMesh:
    """The mesh to shard over.

    Raises:
        RuntimeError: No process group is there and none can be made from the environment.
        ValueError: The mesh has more than two dimensions, or two under other names.
    """
    if mesh is None:
        if not dist.is_initialized():
            try:
                dist.init_process_group()
            except ValueError as error:
                raise RuntimeError(
                    "sshsdp.shard() needs a process group: start the program with torchrun, or "
                    "call "
                    "torch.distributed.init_process_group() first (with world_size=1 for one "
                    "process)"
                ) from error
        kind = device.type if device is not None else _default_device_type()
        return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=(SHARD,))
    names = mesh.mesh_dim_names
    if mesh.ndim > 2:
        raise ValueError(f"the mesh must be 1-D or 2-D (replicate, shard), got {mesh}")
    if mesh.ndim == 2 and names != (REPLICATE, SHARD):
        raise ValueError(
            f"a 2-D mesh must have mesh_dim_names=('replicate', 'shard') in this order, got {names}"
        )
    return mesh


def mesh_sizes(mesh: DeviceMesh, update: UpdatePolicy) -> tuple[int, int]:
    """Number of shards, and of update shards in each of them."""
    num_replicas, num_shards = mesh.shape if mesh.ndim == 2 else (1, mesh.size())
    return num_shards, num_replicas if update.sharding == "hierarchical" else 1


def _default_device_type() -> str:
    backend = str(dist.get_backend())
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or backend in ("gloo", "mpi") else accelerator.type


def _collectives(mesh: DeviceMesh, axis: str, device: torch.device, wire: WireBytes) -> Collectives:
    ranks = mesh.mesh if mesh.ndim == 2 else mesh.mesh.unsqueeze(0)
    ranks_per_group = {SHARD: ranks, REPLICATE: ranks.T, "world": ranks.reshape(1, -1)}[axis]
    world = dist.group.WORLD
    assert world is not None
    timeout = world._get_backend(device).options._timeout
    make: Any = dist.new_subgroups_by_enumeration
    group, _ = make(ranks_per_group.tolist(), timeout=timeout)
    assert group is not None
    return Collectives(group, axis, device, wire)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this rank sits and how it talks.

    Attributes:
        mesh: The mesh as given.
        gather: Collectives over ``shard`` for runtime parameters.
        reduce: Collectives over ``shard`` for gradients.
        replicate: Collectives over ``replicate``; of size 1 on a 1-D mesh.
        world: Collectives over all ranks of the mesh, for small agreements.
        device: Where runtime shards, gradients and gathered parameters live.
        update_device: Where update shards, their gradients and optimizer state live.
        update_sharding: The policy's ``sharding``.
    """

    mesh: DeviceMesh
    gather: Collectives
    reduce: Collectives
    replicate: Collectives
    world: Collectives
    device: torch.device
    update_device: torch.device
    update_sharding: Literal["hierarchical", "replicated"]

    @classmethod
    def build(
        cls,
        mesh: DeviceMesh,
        device: torch.device,
        wire: WireBytes,
        update: UpdatePolicy,
    ) -> Topology:
        """Make the process groups. Collective: every rank of the default group must call it."""

        def collectives(axis: str) -> Collectives:
            return _collectives(mesh, axis, device, wire)

        return cls(
            mesh=mesh,
            gather=collectives(SHARD),
            reduce=collectives(SHARD),
            replicate=collectives(REPLICATE),
            world=collectives("world"),
            device=device,
            # "cpu" and "cpu:0" are unequal.
            update_device=device if update.device in (None, device.type) else torch.device("cpu"),
            update_sharding=update.sharding,
        )

    def more_collectives(self, axis: str) -> Collectives:
        """Collectives over an axis, over process groups of their own. Collective."""
        return _collectives(self.mesh, axis, self.device, self.gather.wire)

    @property
    def is_offloaded(self) -> bool:
        """Whether updates happen on the host and training does not."""
        return self.update_device != self.device

    def synchronize_offload(self) -> None:
        """Wait on the host for gradients that are on their way down."""
        if self.is_offloaded:
            torch.accelerator.current_stream(self.device).synchronize()

    @property
    def num_shards(self) -> int:
        """S, the size of the ``shard`` axis."""
        return self.gather.size

    @property
    def num_replicas(self) -> int:
        """R, the size of the ``replicate`` axis."""
        return self.replicate.size

    @property
    def num_update_slices(self) -> int:
        """Into how many update shards each runtime shard is cut."""
        return self.num_replicas if self.update_sharding == "hierarchical" else 1

    @property
    def update_slice(self) -> int:
        """Which of them is this rank's."""
        return self.replicate.rank if self.update_sharding == "hierarchical" else 0

    def all(self) -> tuple[Collectives, ...]:
        """Every collectives object, for recording."""
        return (self.gather, self.reduce, self.replicate, self.world)
