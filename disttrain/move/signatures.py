"""What our functions and classes take, and which methods they have: read from the source, as some would load torch."""

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
class Found:
    """A definition, and the module that it stands in."""

    module: str
    node: Definition


@cache
def definition(module: str, name: str) -> Found | None:
    """Of a name that a module of ours defines or imports from another; None: it cannot be told, as of overloads."""
    tree = _tree(module)
    if tree is None:
        return None
    own = [node for node in tree.body if isinstance(node, Definition) and node.name == name]
    if own:
        return Found(module, own[0]) if len(own) == 1 else None
    for node in _imports(tree):
        for alias in node.names:
            if alias.name == "*" and (found := definition(node.module or "", name)) is not None:
                return found
            if (alias.asname or alias.name) == name:
                return definition(node.module or "", alias.name)
    return None


@cache
def takes(found: Found) -> Takes | None:
    """What calling it takes; None where that cannot be told."""
    node = found.node
    if not isinstance(node, ast.ClassDef):
        return _of_arguments(node.args, skipped=0)
    for kind in _line_of(found):
        if kind is None:
            return None
        assert isinstance(kind.node, ast.ClassDef)
        methods = {one.name: one for one in kind.node.body if isinstance(one, ast.FunctionDef)}
        if "__new__" in methods or any("dataclass" in ast.unparse(one) for one in kind.node.decorator_list):
            return None
        if "__init__" in methods:
            return _of_arguments(methods["__init__"].args, skipped=1)
    return None


@cache
def method(found: Found, name: str) -> tuple[bool | None, Takes | None]:
    """Whether a class has an attribute of this name (None: who knows), and what it takes where it is a method."""
    if not isinstance(found.node, ast.ClassDef):
        return None, None
    for kind in _line_of(found):
        if kind is None:
            return None, None
        assert isinstance(kind.node, ast.ClassDef)
        own = [one for one in kind.node.body if isinstance(one, ast.FunctionDef) and one.name == name]
        marks = {ast.unparse(mark) for one in own for mark in one.decorator_list}
        if len(own) == 1 and not marks & {"property", "cached_property", "functools.cached_property"}:
            return True, _of_arguments(own[0].args, skipped=0 if "staticmethod" in marks else 1)
        if own or name in _other_attributes(kind.node):
            return True, None
    return False, None


def returned(found: Found) -> Found | None:
    """The class of ours whose object a call gives: its own, or what its annotation names."""
    if isinstance(found.node, ast.ClassDef):
        return found
    result = found.node.returns
    kind = definition(found.module, result.id) if isinstance(result, ast.Name) else None
    return kind if kind is not None and isinstance(kind.node, ast.ClassDef) else None


def _line_of(found: Found) -> Iterator[Found | None]:
    """The class and those that it derives from; None in the place of one that is not ours."""
    yield found
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        known = definition(found.module, base.id) if isinstance(base, ast.Name) else None
        if known is None or not isinstance(known.node, ast.ClassDef):
            yield None if ast.unparse(base) not in ("ABC", "object") else _EMPTY
        else:
            yield from _line_of(known)


_EMPTY = Found("", ast.ClassDef(name="object", bases=[], keywords=[], body=[], decorator_list=[]))


def _other_attributes(node: ast.ClassDef) -> set[str]:
    """Those of the class, and those that its methods set; with `__getattr__` there is no end of them."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return names | {one.attr for one in stored}


def _of_arguments(arguments: ast.arguments, skipped: int) -> Takes:
    positional = [*arguments.posonlyargs, *arguments.args][skipped:]
    names = {one.arg for one in [*positional, *arguments.kwonlyargs]} - {one.arg for one in arguments.posonlyargs}
    num_positional = None if arguments.vararg is not None else len(positional)
    return Takes(frozenset(names), num_positional, arguments.kwarg is not None)


def _imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    for node in tree.body:
        for one in [node, *(node.body if isinstance(node, ast.If) else ())]:
            if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("disttrain"):
                yield one


@cache
def _tree(module: str) -> ast.Module | None:
    path = _ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
