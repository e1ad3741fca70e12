"""Packs: parameters that kernels want as one contiguous tensor.

Example:
    >>> import sshsdp  # doctest: +SKIP
    >>> policy = sshsdp.RuntimePolicy(packs=sshsdp.find_packs(model))  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Pack", "find_packs"]

# Names that model families give to linear layers which read the same input.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
)


@dataclass(frozen=True)
class Pack:
    """Parameters laid out one behind the other, as one runtime tensor.

    The names are relative to any module of the model: wherever a module has all of them, they form
    a pack. They are concatenated along dim 0, so all other dims must agree.

    Attributes:
        names: At least two names, in the order of the packed tensor.
        fuse: The names are weights of sibling ``nn.Linear`` modules. Where they get the very same
            input, they run as one GEMM in forward, for the input gradient and for the weight
            gradient.
    """

    names: tuple[str, ...]
    fuse: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no pack.

        Raises:
            ValueError: Fewer than two names, a name twice, or ``fuse`` of something else than
                weights.
        """
        object.__setattr__(self, "names", tuple(self.names))
        if len(self.names) < 2 or len(set(self.names)) != len(self.names):
            raise ValueError(f"a Pack needs two or more different names, got {self.names}")
        if self.fuse and not all(name.endswith(".weight") for name in self.names):
            raise ValueError(f"a fused Pack names the weights of linear modules, got {self.names}")


def find_packs(model: nn.Module, *, fuse: bool = True) -> tuple[Pack, ...]:
    """The packs that a model's structure allows.

    A module whose children carry the customary names of one group (q/k/v projections, gate and up
    projections) and are all plain ``nn.Linear`` of the same input width, all with or all without
    bias, all trainable or all frozen, gives a pack. Weights that a model keeps fused already,
    experts in ``[E, out, in]`` included, need none.

    Args:
        model: Any model, before `sshsdp.shard`.
        fuse: Run the siblings as one GEMM where they get the same input.

    Returns:
        Packs for ``RuntimePolicy(packs=...)``; empty if nothing was found.
    """
    return tuple(
        Pack(tuple(f"{name}.weight" for name in names), fuse=fuse)
        for names in _SIBLINGS
        if _all_are_siblings(model, names)
    )


def _all_are_siblings(model: nn.Module, names: tuple[str, ...]) -> bool:
    # A pack holds wherever its names occur, so one module that cannot take it rules it out.
    groups = [
        [module._modules.get(name) for name in names]
        for module in model.modules()
        if all(name in module._modules for name in names)
    ]
    return bool(groups) and all(_are_siblings(group) for group in groups)


def _are_siblings(modules: list[nn.Module | None]) -> bool:
    linears = [module for module in modules if type(module) is nn.Linear]
    traits = {
        (
            linear.in_features,
            linear.weight.requires_grad,
            None if linear.bias is None else linear.bias.requires_grad,
        )
        for linear in linears
    }
    return len(linears) == len(modules) and len(traits) == 1
