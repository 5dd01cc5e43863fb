"""Rules of the house that no linter knows: short files, small folders, imports in functions that say why they are
there."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.architecture.conftest import Source

MAX_LINES = 400
MAX_MODULES = 16
LISTS = {"disttrain/dtensor/rules", "disttrain/pipelining/schedules"}
"""Folders with one file for each thing of a kind, where a reader looks for one by its name."""


def test_files_are_short(everything: list[Source]) -> None:
    found = [f"{source.name}: {len(source.lines)} lines" for source in everything if len(source.lines) > MAX_LINES]
    assert found == []


def test_a_folder_can_be_taken_in_at_a_look(library: list[Source]) -> None:
    num_modules = Counter(source.name.rpartition("/")[0] for source in library)
    assert {folder: num for folder, num in num_modules.items() if num > MAX_MODULES and folder not in LISTS} == {}


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
