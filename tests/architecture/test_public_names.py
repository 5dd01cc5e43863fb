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
    """All but those whose name begins with an underscore, which are nobody else's."""
    parts = [package for package in PACKAGES if package.startswith("disttrain.") and package.count(".") == 1]
    public = [package for package in parts if not package.startswith("disttrain._")]
    assert [package for package in public if not _exports(package)] == []


def _front_door() -> dict[str, set[str]]:
    """By module: the names that the front door's imports for type checkers show."""
    homes: dict[str, set[str]] = {}
    tree = ast.parse(PACKAGES["disttrain"].read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)):
        module = node.module or ""
        names = {name for alias in node.names for name in (_exports(module) if alias.name == "*" else [alias.name])}
        homes.setdefault(module, set()).update(names)
    return homes


def _not_exported(homes: Mapping[str, Iterable[str]]) -> list[str]:
    """Names that the front door promises and their homes do not give; a module of a package has no list of its own."""
    missing = []
    for module, names in homes.items():
        exports = _exports(module) if module in PACKAGES else dir(importlib.import_module(module))
        missing += [f"{module} does not export {name}" for name in names if name not in exports]
    return missing


def test_the_front_door_gives_what_its_parts_export() -> None:
    assert _not_exported(_front_door()) == []


def test_a_name_that_no_part_exports_is_found() -> None:
    planted = {"disttrain.mesh": ("DeviceMesh", "no_such_mesh"), "disttrain.reports": ("report", "no_such_report")}
    assert _not_exported(planted) == [
        "disttrain.mesh does not export no_such_mesh",
        "disttrain.reports does not export no_such_report",
    ]


def test_a_type_checker_sees_what_the_front_door_gives() -> None:
    shown = {name for names in _front_door().values() for name in names}
    assert shown | {"__version__"} == set(disttrain.__all__)
