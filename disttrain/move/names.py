"""Translates dotted names of torch's to ours. Our packages' names are read from their source: some would load torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from disttrain.lazy_names import absent_names
from disttrain.move.findings import Reason
from disttrain.move.modules import ELSEWHERE, LEFT, MODULES, PAGES, STAYING_NAMES, STAYS

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Meaning:
    """Of a dotted name: the first `num_parts` of its parts are torch's module, for which stands `ours`.

    `name` is what follows; None: the module itself is meant. `left`: why it does not move. Where both `ours` and
    `left` are None it stays torch's, and works.
    """

    num_parts: int
    ours: str | None = None
    name: str | None = None
    left: Reason | None = None

    @property
    def moves(self) -> bool:
        return self.ours is not None and self.left is None


def meaning(dotted: str) -> Meaning:
    """Of a name that begins with `torch.distributed`."""
    parts = dotted.split(".")
    for num_parts in range(len(parts), 1, -1):
        module = ".".join(parts[:num_parts])
        if num_parts == len(parts) and not is_module(module):
            continue
        if module in STAYS:
            return Meaning(num_parts)
        if module in LEFT:
            return Meaning(num_parts, left=LEFT[module])
        if module in MODULES:
            package, rest = MODULES[module], parts[num_parts:]
            if not rest:
                return Meaning(num_parts, package)
            if f"{module}.{rest[0]}" in STAYING_NAMES:
                return Meaning(num_parts)
            package = ELSEWHERE.get(f"{module}.{rest[0]}", package)
            return Meaning(
                num_parts, package, rest[0], None if rest[0] in names_of(package) else _absent(package, rest[0])
            )
    raise AssertionError(dotted)


def left_of_ours(dotted: str) -> tuple[int, Reason] | None:
    """Of a name of ours that is not here: how many parts name it, and why; None: it is here, as far as we know."""
    parts = dotted.split(".")
    if parts[0] != "disttrain":
        return None
    if len(parts) > 1 and is_module(f"torch.distributed.{parts[1]}") and not _is_ours(parts[1]):
        # A part by torch's name, which did not move.
        part = meaning(".".join(["torch.distributed", *parts[1:]]))
        num_parts = part.num_parts - 1 + (part.name is not None)
        return None if part.left is None else (num_parts, part.left)
    for num_parts in range(len(parts) - 1, 0, -1):
        package, name = ".".join(parts[:num_parts]), parts[num_parts]
        if package in PAGES:
            return (num_parts + 1, _absent(package, name)) if (package, name) in absent_names() else None
    return None


def is_module(dotted: str) -> bool:
    """True for a module of torch.distributed's that we know; what a function of its name hides is none."""
    parent, _, name = dotted.rpartition(".")
    package = MODULES.get(parent)
    is_name = package is not None and (name in names_of(package) or (package, name) in absent_names())
    return not is_name and (dotted in MODULES or dotted in LEFT or dotted in STAYS)


@cache
def names_of(package: str) -> frozenset[str]:
    """The names of one of our packages: its `__all__`, or all that it imports where that is computed."""
    tree = ast.parse(_ROOT.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8"))
    imported: set[str] = set()
    listed: set[str] | None = None
    of_torch: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("disttrain"):
            for alias in node.names:
                imported |= names_of(node.module or "") if alias.name == "*" else {alias.asname or alias.name}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "__all__" and isinstance(node.value, ast.List):
                listed = set(ast.literal_eval(node.value))
            elif node.targets[0].id == "_OF_TORCH":
                of_torch = set(ast.literal_eval(node.value))
    return frozenset((imported if listed is None else listed) | of_torch)


def _is_ours(name: str) -> bool:
    return any((_ROOT / "disttrain" / file).exists() for file in (name, f"{name}.py"))


def _absent(package: str, name: str) -> Reason:
    why = absent_names().get((package, name))
    public = name.lstrip("_")
    if why is None and name != public:
        why = f"{package} has {public}" if public in names_of(package) else "A private name of torch's"
    return Reason(why or f"{package} has no such name", PAGES[package])
