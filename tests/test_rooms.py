"""The package's order: imports point one way, and no modules import each other."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each room imports from itself and from those before it.
ROOMS = [
    "checks",  # of arguments
    "division",
    "comm",
    "ops",
    "metering",
    "gates",
    "layout",
    "plan",
    "agreement",
    "update",
    "hooks",
    "sync",
    "optim",
    "integrations",
]
# What these rooms may import; for all others, any room before them.
MAY_IMPORT = {
    "checks": set(),
    "division": set(),
    "comm": {"checks", "division"},
    "ops": {"checks", "division"},
    "metering": {"checks"},
    "gates": {"checks"},
    "hooks": {"checks", "layout", "update"},
}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    name_of(path): path
    for folder in ("curvadion", "kernels/curvadion_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def tree(name):
    return ast.parse(FILES[name].read_text("utf-8"))


def imports(name):
    """The package's modules that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FILES else node.module)
    return sorted(found & FILES.keys())


def room(name):
    """The room of a module; None for the package's front door and for the Triton kernels."""
    parts = name.split(".")
    return parts[1] if parts[0] == "curvadion" and len(parts) > 1 and parts[1] in ROOMS else None


@pytest.mark.parametrize("name", [name for name in FILES if room(name)])
def test_a_room_imports_from_itself_and_from_rooms_below(name):
    here = room(name)
    for imported in imports(name):
        there = room(imported)
        assert there is not None, f"{name} imports {imported}, which is above all rooms"
        assert ROOMS.index(there) <= ROOMS.index(here), f"{name} imports {imported}"
        allowed = MAY_IMPORT.get(here)
        assert allowed is None or there in allowed | {here}, f"{name} imports {imported}"


def test_kernels_know_the_operations_only():
    for name in FILES:
        if name.startswith("curvadion_kernels"):
            for imported in imports(name):
                assert imported.startswith("curvadion_kernels") or room(imported) == "ops"


def test_no_modules_import_each_other():
    state = {}

    def visit(name, path):
        assert state.get(name) != "open", f"a circle: {' -> '.join([*path, name])}"
        if name not in state:
            state[name] = "open"
            for imported in imports(name):
                if imported != name:
                    visit(imported, [*path, name])
            state[name] = "done"

    for name in FILES:
        visit(name, [])
