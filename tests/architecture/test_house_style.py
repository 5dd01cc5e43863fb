"""Rules of the house that no linter knows: short files, and imports in functions that say why they are there."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.architecture.conftest import Source

MAX_LINES = 400


def test_files_are_short(everything: list[Source]) -> None:
    found = [f"{source.name}: {len(source.lines)} lines" for source in everything if len(source.lines) > MAX_LINES]
    assert found == []


def test_an_import_in_a_function_says_why(library: list[Source]) -> None:
    found = [
        source.at(node)
        for source in library
        for function in source.nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        if not any("#" in line for line in source.lines[node.lineno - 2 : node.end_lineno])
    ]
    assert found == []
