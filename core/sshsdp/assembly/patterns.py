"""Patterns over names: ``fnmatch`` globs whose ``*`` crosses dots."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["check_patterns", "first_match"]

T = TypeVar("T")


def first_match(name: str, patterns: Mapping[str, T]) -> T | None:
    """The value of the first pattern that matches ``name``."""
    for pattern, value in patterns.items():
        if fnmatchcase(name, pattern):
            return value
    return None


def check_patterns(patterns: Iterable[str], names: Iterable[str], where: str) -> None:
    """Refuse patterns that match no name.

    Raises:
        ValueError: Names the pattern, what it was given for, and some names that exist.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"{where}: the pattern {pattern!r} matches no name of the model. Patterns are "
                "fnmatch globs "
                f"over full names, where '*' also crosses dots; the model's names are: {shown}"
            )
