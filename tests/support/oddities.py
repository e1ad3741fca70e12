"""Small models, each with something in it that sharding can get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.subject import Subject, widened

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ODDITIES"]

WIDTH = 8


class Residual(nn.Module):
    """The ordinary block that oddities are mixed with."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Chain(nn.Module):
    """Blocks in a row, each a unit, and a linear layer in the root unit."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(nn.Module):
    """A 0-dimensional parameter beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Narrow(nn.Module):
    """Parameters with fewer rows, and with fewer elements, than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 1)
        self.gate = nn.Parameter(torch.ones(3))
        self.up = nn.Linear(1, WIDTH, bias=False)
        self.wide = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x)) * self.gate.sum() + (x @ self.wide.t()) @ self.wide


class Transposed(nn.Module):
    """A parameter whose memory is not in row-major order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 6).t())
        self.cube = nn.Parameter(torch.randn(2, 3, WIDTH).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(x, self.weight) @ self.weight + self.cube.sum((1, 2))


class CalledTwice(nn.Module):
    """Runs its units twice, and one layer of its own three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(torch.sin(self.linear(x)))
        return self.linear(x)


class Outer(nn.Module):
    """A unit that holds another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = Residual()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.inner(self.before(x))))


class Weighted(nn.Module):
    """Multiplies by a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("bi,oi->bo", torch.tanh(x), self.weight)


class Branches(nn.Module):
    """Runs one of several branches, each a unit; which one comes with the data."""

    def __init__(self, num_branches: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(num_branches))
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.blocks[branch](self.first(x))


class PartlyUsed(nn.Module):
    """Reaches into its units past their forward: some parameters are never used, one unit never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Outer(), Outer(), Residual()])
        for block in self.blocks[:2]:
            block.side = Weighted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[:2]:
            x = x + block.side(block.inner(block.before(x)))
        return x


def shared_over_blocks() -> nn.Module:
    model = Chain(Weighted(), Residual(), Weighted())
    model.blocks[2].weight = model.blocks[0].weight
    return model


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank addition, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.left = nn.Linear(WIDTH, 2, bias=False)
        self.right = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.right(self.left(x))


class Quantized(nn.Module):
    """A frozen table of bytes with a trainable scale, as in 4-bit and 8-bit base models."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randint(0, 256, (WIDTH, WIDTH), dtype=torch.uint8)
        self.table = nn.Parameter(table, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(x, self.table.to(x.dtype) / 128 - 1) * self.scale


class Borrowed(nn.Module):
    """Uses the weight of a layer through a function, beside the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.tanh(self.linear(x)), self.linear.weight.t())


class Buffered(nn.Module):
    """Persistent and non-persistent buffers, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH), persistent=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.linear(x) + x @ self.table.to(x.dtype) + self.shift.to(x.dtype)


class Structured(nn.Module):
    """Takes nested keyword arguments and returns a tuple with a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.auxiliary = nn.Linear(WIDTH, 1)

    def forward(self, *, state: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        x = state["hidden"][0]
        return torch.tanh(self.linear(x)), {"auxiliary": [self.auxiliary(x)], "count": 1}


class StructuredChain(nn.Module):
    """Blocks that speak in nested containers; the loss uses their side outputs too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = x.new_zeros(())
        for block in self.blocks:
            x, extra = block(state={"hidden": (x,), "unused": None})
            side = side + extra["auxiliary"][0].mean()
        return x + side


@dataclass
class Hidden:
    """What a block returns instead of a tensor."""

    values: torch.Tensor
    label: str


class Wrapped(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Hidden) -> Hidden:
        return Hidden(torch.tanh(self.linear(hidden.values)), "after")


class Opaque:
    """An object that no tree utility can look into."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class OpaqueBlock(nn.Module):
    """Returns an object that hides its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden: Opaque) -> Opaque:
        return Opaque(torch.tanh(self.linear(hidden.values)) @ self.weight)


class ObjectChain(nn.Module):
    """Hands objects from block to block."""

    def __init__(self, block: type[nn.Module], wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self._wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self._wrap(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.values


class FromData(nn.Module):
    """Its units get the data itself, which needs no gradient; so does a block without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual(), Constant()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.blocks[1](x) + self.blocks[2]()


class Constant(nn.Module):
    """A learned constant: a unit without any input."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> torch.Tensor:
        return self.values.tanh()


def rows(generator: torch.Generator, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def rows_and_rank(generator: torch.Generator, rank: int) -> tuple[torch.Tensor, int]:
    return rows(generator, rank), rank % 2


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    args = batch if isinstance(batch, tuple) else (batch,)
    return (widened(model(*args)) - 0.5).square().mean()


def _subject(
    name: str, build: Callable[[], nn.Module], units: tuple[str, ...] | None = None
) -> Subject:
    return Subject(name, build, rows, mean_square, units)


ODDITIES = [
    _subject("a scalar", lambda: Chain(Scaled(), Residual())),
    _subject("fewer rows than ranks", lambda: Chain(Narrow(), Residual())),
    _subject("non-contiguous", lambda: Chain(Transposed(), Residual())),
    _subject("called twice", CalledTwice),
    _subject("nested units", lambda: Chain(Outer(), Outer()), ("blocks.?", "blocks.?.inner")),
    _subject("partly used", PartlyUsed),
    Subject("used by some ranks", Branches, rows_and_rank, mean_square, None, True),
    _subject("shared over blocks", shared_over_blocks),
    _subject("frozen mixed in", lambda: Chain(LowRank(), Residual(), LowRank())),
    _subject("frozen bytes", lambda: Chain(Quantized(), Residual())),
    _subject("bare parameter", lambda: Chain(Weighted(), Residual())),
    _subject("borrowed weight", lambda: Chain(Borrowed(), Residual())),
    _subject("buffers", lambda: Chain(Buffered(), Residual())),
    _subject("nested arguments", StructuredChain),
    _subject(
        "dataclass outputs",
        lambda: ObjectChain(Wrapped, lambda values: Hidden(values, "before")),
    ),
    _subject("opaque outputs", lambda: ObjectChain(OpaqueBlock, Opaque)),
    _subject("inputs without gradient", FromData),
]
