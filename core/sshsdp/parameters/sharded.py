"""Runtime parameters outside of forward and backward: names and shapes, but no data.

Note: a sharded parameter answers questions, not reads. While a unit is sharded, its parameters'
class is `ShardedParameter`: shape, dtype, device and the like work, and every operation that would
read the freed storage raises an error that says what to do. While the unit is gathered the class is
the original one, so that kernels and compilers see an ordinary ``nn.Parameter``. The object stays
the same throughout, so optimizers and tied modules keep their references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "SLOT_ATTRIBUTE",
    "ShardedParameter",
    "is_identity",
    "is_metadata",
    "property_getter",
]

SLOT_ATTRIBUTE = "_sshsdp_slot"


class _Slot(Protocol):
    """What messages tell of the slot under `SLOT_ATTRIBUTE`."""

    name: str

    @property
    def unit_name(self) -> str: ...

    def has_reduced_gradient(self) -> bool: ...


def _slot_of(parameter: object) -> _Slot | None:
    return getattr(parameter, SLOT_ATTRIBUTE, None)


class ShardedParameter(nn.Parameter):
    """The class of a runtime parameter while its unit is sharded."""

    # Functions that use a tensor's metadata only, beside property getters and setters.
    _metadata_functions: ClassVar[frozenset[Any]] = frozenset(
        {
            torch.Tensor.__hash__,
            torch.Tensor.__len__,
            torch.Tensor.size,
            torch.Tensor.stride,
            torch.Tensor.dim,
            torch.Tensor.numel,
            torch.Tensor.nelement,
            torch.Tensor.element_size,
            torch.Tensor.is_contiguous,
            torch.Tensor.is_floating_point,
            torch.Tensor.is_complex,
            torch.Tensor.is_signed,
            torch.Tensor.get_device,
            torch.Tensor.requires_grad_,
            torch.Tensor.register_hook,
            torch.Tensor.register_post_accumulate_grad_hook,
            torch.is_floating_point,
            torch.is_complex,
            torch.numel,
            torch.zeros_like,
            torch.ones_like,
            torch.empty_like,
            torch.full_like,
            torch.rand_like,
            torch.randn_like,
        }
    )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let metadata through, refuse reads and writes of data."""
        kwargs = kwargs or {}
        if func in _CONVERSIONS and is_identity(args[0], args[1:], kwargs):
            return args[0]
        if is_metadata(func):
            if func == _GRAD_GETTER:
                _refuse_gradient_reads(args[0])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _DATA_SETTER and args[0] is args[1]:
            return None
        if func is torch._has_compatible_shallow_copy_type and args[0] is args[1]:
            return True
        raise RuntimeError(_read_message(func, args, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]  # torch names an argument oddly
        """Name and metadata; the data is not there."""
        slot = _slot_of(self)
        name = slot.name if slot else "?"
        return (
            f"ShardedParameter({name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Refuse: a copy would have no data."""
        raise RuntimeError(_read_message(torch.Tensor.clone, (self,), {}))

    def __reduce_ex__(self, proto: Any) -> Any:
        """Refuse: a pickle would have no data."""
        raise RuntimeError(_read_message(torch.Tensor.clone, (self,), {}))


_properties: Any = torch.Tensor


def property_getter(name: str) -> Any:
    """What `__torch_function__` is given when a tensor's property is read.

    It is the bound method of the descriptor: a new one each time, but they compare equal.
    """
    return getattr(_properties, name).__get__


_GRAD_GETTER = property_getter("grad")
_DATA_SETTER = _properties.data.__set__
_DATA_PROPERTIES = frozenset(
    {_DATA_SETTER}
    | {property_getter(name) for name in ("data", "T", "H", "mT", "mH", "real", "imag")}
)
_CONVERSIONS = frozenset({torch.Tensor.to})


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether a function of torch uses nothing but a tensor's metadata."""
    is_property = func.__class__.__name__ == "method-wrapper"
    return func in ShardedParameter._metadata_functions or (
        is_property and func not in _DATA_PROPERTIES
    )


def is_identity(tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``tensor.to(*args, **kwargs)`` would return the tensor itself."""
    if not args and not kwargs:
        return False
    try:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False
    return device in (None, tensor.device) and dtype in (None, tensor.dtype)


def _refuse_gradient_reads(parameter: object) -> None:
    slot = _slot_of(parameter)
    if slot is not None and slot.has_reduced_gradient():
        raise RuntimeError(
            f"the gradient of {slot.name!r} is sharded and belongs to its update parameter: clip "
            "with "
            "engine.clip_grad_norm_() or engine.clip_grad_value_(), read it from "
            "engine.update_parameters(), and clear it with optimizer.zero_grad()"
        )


def _read_message(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    # Only the first sharded parameter is named: it is the one that the user's line reads.
    values = [*args, *kwargs.values()]
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    sharded = next((v for v in flat if isinstance(v, ShardedParameter)), None)
    slot = _slot_of(sharded)
    operation = getattr(func, "__name__", str(func))
    if slot is None:
        return f"{operation}: this parameter is sharded and has no data here"
    return (
        f"{operation}: parameter {slot.name!r} is sharded (unit {slot.unit_name!r}) and has no "
        "data here. "
        "Run it through the sharded module's forward, or read and write whole parameters under "
        "`with engine.unsharded(writes=...)`; for exports use engine.full_state_dict(), and move "
        "or cast "
        "a model before sshsdp.shard()"
    )
