"""No module imports another that imports it in turn, neither at run time nor for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from tests.architecture.conftest import Source


def test_imports_go_one_way(library: list[Source]) -> None:
    sources = {_module_of(source): source for source in library}
    imported = {
        name: {module for module in _imports(source, set(sources)) if module != name}
        for name, source in sources.items()
    }
    cycle: list[str] = []
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == [], "a cycle of imports, each module imported by the next"


def _module_of(source: Source) -> str:
    return source.name.removeprefix("launcher/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(source: Source, modules: set[str]) -> Iterator[str]:
    """What the module imports when it is loaded, or would if type checkers ran it; not what its functions import."""
    for node in _outside_of_functions(source.tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
        else:
            continue
        for name, package in names:
            # A package's names are its modules, or what it defines.
            yield from [each for each in (name, package) if each in modules][:1]


def _outside_of_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _outside_of_functions(node)
