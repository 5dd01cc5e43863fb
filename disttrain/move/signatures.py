"""Reads the arguments and methods of our functions and classes from their source, as some would load torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Takes:
    """Arguments of a call: their names, how many may come without one (None: any number), whether any name will do."""

    names: frozenset[str]
    num_positional: int | None
    any_name: bool = False


@dataclass(frozen=True)
class Defined:
    """A definition, and the module that it stands in."""

    module: str
    node: Definition


@cache
def definition(module: str, name: str) -> Defined | None:
    """Of a name that a module of ours defines or imports from another; None: it cannot be told, as of overloads."""
    tree = _tree(module)
    if tree is None:
        return None
    nodes = [node for node in tree.body if isinstance(node, Definition) and node.name == name]
    if nodes:
        return Defined(module, nodes[0]) if len(nodes) == 1 else None
    for node in _imports(tree):
        for alias in node.names:
            if alias.name == "*" and (defined := definition(node.module or "", name)) is not None:
                return defined
            if (alias.asname or alias.name) == name:
                return definition(node.module or "", alias.name)
    return None


@cache
def takes(defined: Defined) -> Takes | None:
    """The arguments of a call of it; None where they cannot be told."""
    node = defined.node
    if not isinstance(node, ast.ClassDef):
        return _of_arguments(node.args, skipped=0)
    for kind in _line_of(defined):
        if kind is None:
            return None
        assert isinstance(kind.node, ast.ClassDef)
        methods = {node.name: node for node in kind.node.body if isinstance(node, ast.FunctionDef)}
        if "__new__" in methods or any("dataclass" in ast.unparse(mark) for mark in kind.node.decorator_list):
            return None
        if "__init__" in methods:
            return _of_arguments(methods["__init__"].args, skipped=1)
    return None


@cache
def method(defined: Defined, name: str) -> tuple[bool | None, Takes | None]:
    """True when a class has an attribute of this name (None: who knows), and its arguments where it is a method."""
    if not isinstance(defined.node, ast.ClassDef):
        return None, None
    for kind in _line_of(defined):
        if kind is None:
            return None, None
        assert isinstance(kind.node, ast.ClassDef)
        methods = [node for node in kind.node.body if isinstance(node, ast.FunctionDef) and node.name == name]
        marks = {ast.unparse(mark) for node in methods for mark in node.decorator_list}
        if len(methods) == 1 and not marks & {"property", "cached_property", "functools.cached_property"}:
            return True, _of_arguments(methods[0].args, skipped=0 if "staticmethod" in marks else 1)
        if methods or name in _other_attributes(kind.node):
            return True, None
    return False, None


def returned(defined: Defined) -> Defined | None:
    """The class of ours whose object a call gives: its own, or what its annotation names."""
    if isinstance(defined.node, ast.ClassDef):
        return defined
    result = defined.node.returns
    kind = definition(defined.module, result.id) if isinstance(result, ast.Name) else None
    return kind if kind is not None and isinstance(kind.node, ast.ClassDef) else None


def _line_of(defined: Defined) -> Iterator[Defined | None]:
    """The class and those that it derives from; None in the place of one that is not ours."""
    yield defined
    assert isinstance(defined.node, ast.ClassDef)
    for base in defined.node.bases:
        parent = definition(defined.module, base.id) if isinstance(base, ast.Name) else None
        if parent is None or not isinstance(parent.node, ast.ClassDef):
            yield None if ast.unparse(base) not in ("ABC", "object") else _EMPTY
        else:
            yield from _line_of(parent)


_EMPTY = Defined("", ast.ClassDef(name="object", bases=[], keywords=[], body=[], decorator_list=[]))


def _other_attributes(node: ast.ClassDef) -> set[str]:
    """Those of the class, and those that its methods set; with `__getattr__` there is no end of them."""
    stored = [part for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Store)]
    names = {part.id for part in stored if isinstance(part, ast.Name)}
    return names | {part.attr for part in stored if isinstance(part, ast.Attribute)}


def _of_arguments(arguments: ast.arguments, skipped: int) -> Takes:
    positional = [*arguments.posonlyargs, *arguments.args][skipped:]
    names = {argument.arg for argument in [*positional, *arguments.kwonlyargs]}
    names -= {argument.arg for argument in arguments.posonlyargs}
    num_positional = None if arguments.vararg is not None else len(positional)
    return Takes(frozenset(names), num_positional, arguments.kwarg is not None)


def _imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    for node in tree.body:
        for statement in [node, *(node.body if isinstance(node, ast.If) else ())]:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("disttrain"):
                yield statement


@cache
def _tree(module: str) -> ast.Module | None:
    path = _ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
