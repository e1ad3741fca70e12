"""How far two outcomes lie apart, and how far they may.

Note: bounds. Model and reference run in float64 (the fixture ``double``). What may differ then is
the order of sums, and what that does is known: a rounding is 2**-53 of its operands, and some
thousand of them, which ten steps of training amplify, stay below `ROUNDING`. The least real fault
is far above: a value that was rounded to float32 anywhere on the way is off by 2**-25, a
contribution that is lost, doubled or late by parts in a hundred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.margins import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tests.support.training import Outcome

__all__ = [
    "ROUNDING",
    "assert_close",
    "assert_identical",
    "assert_rounds_alike",
    "assert_weights_close",
    "assert_within",
    "distance",
    "relative_error",
    "worst_weight",
]

ROUNDING = 1e-12


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).norm().item()
    return difference / max(expected.norm().item(), 1e-30) if difference else 0.0


def assert_within(error: float, bound: float, what: str = "") -> None:
    """``error`` is ``bound`` at most."""
    record(error, bound, what)
    assert error <= bound, f"{what} differs by {error:.2e}, more than {bound:.2e}"


def worst_weight(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name; the names must be the same."""
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, name
    return max((relative_error(actual[name], expected[name]), name) for name in actual)


def assert_weights_close(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float = ROUNDING,
) -> None:
    """Every tensor agrees to a relative tolerance; the names are the same."""
    error, name = worst_weight(actual, expected)
    assert_within(error, tolerance, name)


def _largest(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected)
    return max(
        (abs(a - e) / max(abs(e), 1e-30) for a, e in zip(actual, expected, strict=True)), default=0
    )


def assert_close(actual: Outcome, expected: Outcome, tolerance: float = ROUNDING) -> None:
    """Losses, norms and final weights agree to a relative tolerance."""
    assert_weights_close(actual.weights, expected.weights, tolerance)
    assert_within(_largest(actual.losses, expected.losses), tolerance, "a loss")
    assert_within(_largest(actual.norms, expected.norms), tolerance, "a norm")


def distance(left: Any, right: Any) -> float:
    """Between two lists of numbers (the largest one) or dicts of tensors (Euclidean)."""
    if isinstance(left, dict):
        pairs = zip(left.values(), right.values(), strict=True)
        return sum((a.double() - b.double()).square().sum().item() for a, b in pairs) ** 0.5
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


def assert_rounds_alike(actual: Any, expected: Any, unrounded: Any) -> None:
    """Two runs in bf16 lie no further apart than rounding explains.

    Either is one run's rounding away from the same run in float32, so the two are at most two of
    them apart. How far one reaches is the reference's to show; three times that is left for chance.

    Args:
        actual: With ``losses``, ``norms`` and ``weights``.
        expected: The reference in bf16.
        unrounded: The reference in float32.
    """
    for kind in ("losses", "norms", "weights"):
        values = getattr(actual, kind)
        # Only one rank has the weights.
        if values:
            spread = distance(getattr(expected, kind), getattr(unrounded, kind))
            assert spread > 0
            assert_within(distance(values, getattr(expected, kind)), 6 * spread, kind)


def assert_identical(actual: Outcome, expected: Outcome) -> None:
    """Losses, norms and final weights agree bit for bit."""
    assert_close(actual, expected, tolerance=0.0)
