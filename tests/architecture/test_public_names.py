"""Public names: listed once, in order, all there, and the same at the front door."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import disttrain

ROOT = Path(__file__).parents[2]
PACKAGES = {
    ".".join(path.parent.relative_to(base).parts): path
    for base in (ROOT, ROOT / "launcher")
    for path in base.glob("disttrain*/**/__init__.py")
}


def _exports(package: str) -> list[str]:
    return list(getattr(importlib.import_module(package), "__all__", []))


def test_exports_are_sorted() -> None:
    """And none stands there twice."""
    exports = {package: _exports(package) for package in PACKAGES}
    assert [package for package, names in exports.items() if names != sorted(set(names))] == []


def test_exports_are_there() -> None:
    exports = [(importlib.import_module(package), name) for package in PACKAGES for name in _exports(package)]
    assert [f"{module.__name__}.{name}" for module, name in exports if not hasattr(module, name)] == []


def test_every_part_lists_its_exports() -> None:
    parts = [package for package in PACKAGES if package.startswith("disttrain.") and package.count(".") == 1]
    assert [package for package in parts if not _exports(package)] == []


def _not_exported(homes: Mapping[str, Iterable[str]]) -> list[str]:
    """Names that the front door promises and their homes do not give; a module of a package has no list of its own."""
    found = []
    for home, names in homes.items():
        module = f"disttrain.{home}"
        given = _exports(module) if module in PACKAGES else dir(importlib.import_module(module))
        found += [f"{module} does not export {name}" for name in names if name not in given]
    return found


def test_the_front_door_gives_what_its_parts_export() -> None:
    assert _not_exported(disttrain._HOMES) == []


def test_a_name_that_no_part_exports_is_found() -> None:
    planted = {"mesh": ("DeviceMesh", "no_such_mesh"), "reports": ("report", "no_such_report")}
    assert _not_exported(planted) == [
        "disttrain.mesh does not export no_such_mesh",
        "disttrain.reports does not export no_such_report",
    ]


def test_a_type_checker_sees_what_the_front_door_gives() -> None:
    seen: set[str] = set()
    tree = ast.parse(PACKAGES["disttrain"].read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)):
        for alias in node.names:
            seen |= set(_exports(node.module or "")) if alias.name == "*" else {alias.name}
    assert seen == {name for names in disttrain._HOMES.values() for name in names}
