"""What accelerators and their links can do, from data sheets.

The predictions use a share of these peaks (``gemm_efficiency``, ``link_efficiency``), which are
assumptions: give measured ones in a JSON file to have better predictions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["HARDWARE", "Hardware", "find_hardware"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of accelerator in nodes of several.

    Attributes:
        name: For tables.
        memory_bytes: Memory of one accelerator.
        dense_flops: Peak bf16 operations per second (a multiply-add is two), without sparsity.
        mxfp8_flops: The same for block-scaled MXFP8; 0 where it has to be emulated in bf16.
        memory_bandwidth: Bytes per second from and to its memory.
        node_bandwidth: Bytes per second into one accelerator from others of its node.
        network_bandwidth: Bytes per second into one accelerator's network adapter.
        ranks_per_node: Accelerators in a node.
        host_bandwidth: Bytes per second between an accelerator and the host.
        host_memory_bandwidth: Bytes per second of host memory, one rank's share.
        gemm_efficiency: Share of the peak that the model's matrix products reach.
        link_efficiency: Share of the bandwidths that collectives reach.
        latency: Seconds that a collective takes however small it is.
    """

    name: str
    memory_bytes: int
    dense_flops: float
    mxfp8_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    ranks_per_node: int = 8
    host_bandwidth: float = 50e9
    host_memory_bandwidth: float = 40e9
    gemm_efficiency: float = 0.65
    link_efficiency: float = 0.8
    latency: float = 20e-6

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "name":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"hardware: {item.name} must be a number, got {value!r}")
            least_is_zero = item.name in ("mxfp8_flops", "latency")
            if value < 0 or (value == 0 and not least_is_zero):
                raise ValueError(f"hardware: {item.name} must be positive, got {value}")

    def flops(self, *, uses_mxfp8: bool) -> float:
        """Peak of the matrix products in a format."""
        return self.mxfp8_flops if uses_mxfp8 and self.mxfp8_flops else self.dense_flops

    def axis_bandwidth(self, axis_size: int, stride: int) -> float:
        """Bytes per second into a rank from its peers on one mesh axis.

        Ranks are numbered along the last axis first, so the peers of a rank are ``stride`` apart.
        An axis inside a node runs at the node's speed. One that spans nodes is bound by the
        network, of which it uses as many adapters as it has ranks in a node.

        Args:
            axis_size: Ranks on the axis.
            stride: Distance of neighbours in global ranks.
        """
        if axis_size * stride <= self.ranks_per_node:
            return self.node_bandwidth * self.link_efficiency
        in_node = max(self.ranks_per_node // stride, 1)
        bandwidth = min(in_node * self.network_bandwidth, self.node_bandwidth)
        return bandwidth * self.link_efficiency


HARDWARE: dict[str, Hardware] = {
    item.name: item
    for item in (
        Hardware(
            name="H100",
            memory_bytes=80 * _GIB,
            dense_flops=989e12,
            mxfp8_flops=0.0,
            memory_bandwidth=3.35e12,
            node_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        Hardware(
            name="H200",
            memory_bytes=141 * 10**9,
            dense_flops=989e12,
            mxfp8_flops=0.0,
            memory_bandwidth=4.8e12,
            node_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        Hardware(
            name="B200",
            memory_bytes=180 * 10**9,
            dense_flops=2250e12,
            mxfp8_flops=4500e12,
            memory_bandwidth=7.7e12,
            node_bandwidth=900e9,
            network_bandwidth=50e9,
        ),
    )
}


def find_hardware(name_or_path: str) -> Hardware:
    """A known kind by name, or one described in a JSON file with `Hardware`'s fields.

    The file may leave fields out if it names a known kind in ``"base"``.

    Raises:
        ValueError: Neither a known name nor a file, or the file's fields are not the ones wanted.
    """
    known = {name.lower(): item for name, item in HARDWARE.items()}
    if name_or_path.lower() in known:
        return known[name_or_path.lower()]
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"--hardware must be one of {', '.join(HARDWARE)} or a JSON file, got {name_or_path!r}"
        )
    try:
        given = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hardware {path}: not JSON ({error})") from error
    if not isinstance(given, dict):
        raise ValueError(f"--hardware {path}: a JSON object is wanted, got {type(given).__name__}")
    base = given.pop("base", None)
    if base is not None and str(base).lower() not in known:
        raise ValueError(f"--hardware {path}: base must be one of {', '.join(HARDWARE)}")
    values: dict[str, Any] = {"name": path.stem}
    if base is not None:
        values = {
            item.name: getattr(known[str(base).lower()], item.name) for item in fields(Hardware)
        } | values
    values |= given
    try:
        return Hardware(**values)
    except (TypeError, ValueError) as error:
        names = ", ".join(item.name for item in fields(Hardware))
        raise ValueError(f"--hardware {path}: {error}; the fields are {names}, base") from error
