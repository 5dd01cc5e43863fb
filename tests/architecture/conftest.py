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

    def at(self, node: ast.stmt | ast.expr) -> str:
        """`path:line`, as editors open it."""
        return f"{self.name}:{node.lineno}"

    def imports(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
        """Every imported thing by its full name: `from a.b import c` gives `a.b.c`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


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
