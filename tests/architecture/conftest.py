"""The repository's Python files as syntax trees, for the tests that read code instead of running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file; `name` is its path in the repository."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse("\n".join(self.lines), filename=self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree's."""
        return [*ast.walk(self.tree)]

    @cached_property
    def full_names(self) -> list[tuple[str, str]]:
        """`path:line` and full name of everything imported, and of every chain of attributes taken from it."""
        names = [(self.at(imported), name) for imported, name in self.imports()]
        aliases = self._aliases()
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        inner = {id(node.value) for node in attributes}
        outer = [node for node in attributes if id(node) not in inner]
        return names + [(self.at(node), name) for node in outer if (name := _dotted(node, aliases))]

    def at(self, node: ast.stmt | ast.expr) -> str:
        """`path:line`, as editors open it."""
        return f"{self.name}:{node.lineno}"

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
        """Every imported thing by its full name: `from a.b import c` gives `a.b.c`."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)

    def _aliases(self) -> dict[str, str]:
        """The full name of what each imported name stands for."""
        aliases = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    aliases[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom):
                aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        return aliases


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`a.b.c` as a full name when `a` was imported, else an empty text."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _sources(*folders: str) -> list[Source]:
    return [Source(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def library() -> list[Source]:
    """What is installed: disttrain and its launcher."""
    return _sources("disttrain", "launcher")


@pytest.fixture(scope="session")
def everything(library: list[Source]) -> list[Source]:
    """The library, and what tests, measures and shows it."""
    return library + _sources("tests", "benchmarks", "examples")
