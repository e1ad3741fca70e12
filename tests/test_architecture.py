"""The map of the house: which room may import from which, read off the sources.

Imports under ``TYPE_CHECKING`` and inside of functions count too.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).parent.parent
ADAPTERS = ("lightning_sshsdp", "accelerate_sshsdp")

# From the ground up: a room imports only from itself and from rooms in front of it.
ROOMS = [
    "layout",  # arithmetic of address spaces
    "formats",  # what the bytes of a weight are, and who multiplies them
    "packs",
    "policies",  # what a user may choose
    "comm",  # process groups, collectives, agreements between ranks
    "stats",
    "parameters",  # what modules see
    "spaces",  # address spaces and units at work
    "ownership",  # whole matrices on owners
    "schedule",  # who is gathered, freed and reduced when
    "assembly",  # from a model to slots and units
    "optim",  # optimizers, and what binds them to update parameters
    "checkpoint",
    "estimate",  # what a run will need, without one
    "engine",  # what a user holds
    "pretrained",
    "pretrained_saving",
    "cli",
    "__main__",
    "",  # the package itself: what is public
]


def module_of(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imports_of(source: str, modules: Iterable[str]) -> set[str]:
    """The modules among ``modules`` that a source imports."""
    known, found = set(modules), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            found.update(
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                for alias in node.names
            )
    return found & known


def read(root: Path, package: str) -> dict[str, str]:
    return {module_of(path, root): path.read_text() for path in (root / package).rglob("*.py")}


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    return {name: imports_of(source, sources) - {name} for name, source in sources.items()}


def room_of(module: str) -> str:
    return module.removeprefix("sshsdp").removeprefix(".").partition(".")[0]


def arrows_up(graph: Mapping[str, set[str]]) -> list[str]:
    floor = {room: index for index, room in enumerate(ROOMS)}
    return sorted(
        f"{module} -> {imported}"
        for module, its_imports in graph.items()
        for imported in its_imports
        if floor[room_of(imported)] > floor[room_of(module)]
    )


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """What is left when modules that import nothing that is left are taken away, and importers."""
    left = {module: set(its_imports) for module, its_imports in graph.items()}
    while True:
        free = {m for m, i in left.items() if not i & left.keys()}
        free |= {m for m in left if not any(m in i for i in left.values())}
        if not free:
            return sorted(left)
        left = {m: i - free for m, i in left.items() if m not in free}


CORE = read(ROOT / "core", "sshsdp")


def test_rooms_import_from_rooms_below() -> None:
    assert {room_of(module) for module in CORE} <= {*ROOMS}
    assert arrows_up(graph_of(CORE)) == []


@pytest.mark.parametrize("package", ["sshsdp", *ADAPTERS])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    sources = CORE if package == "sshsdp" else read(ROOT, package)
    assert circles(graph_of(sources)) == []


@pytest.mark.parametrize("package", ADAPTERS)
def test_adapters_know_the_public_names_only(package: str) -> None:
    public = {*sshsdp.__all__, "optim", "estimate"}
    for module, source in read(ROOT, package).items():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "sshsdp":
                assert {alias.name for alias in node.names} <= public, module
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("sshsdp."), f"{module}: {node.module}"
            elif isinstance(node, ast.Import):
                assert not any(a.name.startswith("sshsdp.") for a in node.names), module
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "sshsdp"
            ):
                assert node.attr in public, f"{module}: sshsdp.{node.attr}"


def test_an_arrow_that_goes_up_is_found() -> None:
    for line in (
        "from sshsdp.engine.engine import Engine",
        "if TYPE_CHECKING:\n    from sshsdp.engine import engine",
        "def f():\n    import sshsdp.engine.engine",
    ):
        graph = graph_of({**CORE, "sshsdp.layout.cuts": line})
        assert any(
            arrow.startswith("sshsdp.layout.cuts -> sshsdp.engine") for arrow in arrows_up(graph)
        )


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set()}
    assert circles(graph) == ["b", "c"]
    assert circles({"a": {"b"}, "b": set()}) == []


# Where splitting would hurt, with the reason.
LONG_FILES = {
    "checkpoint/optimizer_state.py": "one format, read and written",
    "schedule/schedule.py": "one state machine",
    "spaces/space.py": "one address space",
}
LONG_FUNCTIONS = {"cli.py:plan": "the options of a command are its arguments"}
LARGE_ROOMS = {"estimate": "small files, each one quantity or one table of the plan"}
MOST_LINES, MOST_FUNCTION_LINES, MOST_FILES = 400, 60, 12


def test_files_functions_and_rooms_are_small() -> None:
    long_files, long_functions, files = [], [], {}
    for path in sorted((ROOT / "core/sshsdp").rglob("*.py")):
        name = path.relative_to(ROOT / "core/sshsdp").as_posix()
        files.setdefault(path.parent.name, []).append(name)
        source = path.read_text()
        if len(source.splitlines()) > MOST_LINES:
            long_files.append(name)
        long_functions += [
            f"{name}:{node.name}"
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and _length(node) > MOST_FUNCTION_LINES
        ]
    assert long_files == sorted(LONG_FILES)
    assert long_functions == sorted(LONG_FUNCTIONS)
    # Beside `__init__`.
    assert {room for room, names in files.items() if len(names) - 1 > MOST_FILES} == {*LARGE_ROOMS}


def _length(node: ast.FunctionDef) -> int:
    """Lines of code: a docstring is no complexity."""
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        assert first.end_lineno is not None
        total -= first.end_lineno - first.lineno + 1
    return total
