"""How far two outcomes lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tests.support.training import Outcome

__all__ = ["assert_close", "assert_identical", "relative_error", "worst_weight"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).norm().item()
    return difference / max(expected.norm().item(), 1e-30) if difference else 0.0


def worst_weight(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name; the names must be the same."""
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, name
    return max((relative_error(actual[name], expected[name]), name) for name in actual)


def _largest(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected)
    return max(
        (abs(a - e) / max(abs(e), 1e-30) for a, e in zip(actual, expected, strict=True)), default=0
    )


def assert_close(actual: Outcome, expected: Outcome, tolerance: float = 1e-6) -> None:
    """Losses, norms and final weights agree to a relative tolerance."""
    error, name = worst_weight(actual.weights, expected.weights)
    assert error <= tolerance, f"{name} differs by {error:.2e}"
    assert _largest(actual.losses, expected.losses) <= tolerance
    assert _largest(actual.norms, expected.norms) <= tolerance


def assert_identical(actual: Outcome, expected: Outcome) -> None:
    """Losses, norms and final weights agree bit for bit."""
    assert_close(actual, expected, tolerance=0.0)
