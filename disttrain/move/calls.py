"""Calls of names that move: arguments that are not here, and methods. What cannot be told is passed over."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from disttrain.lazy_names import absent_names
from disttrain.move.findings import Finding
from disttrain.move.modules import PAGES
from disttrain.move.names import meaning
from disttrain.move.signatures import Defined, Takes, definition, method, returned, takes

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def told_calls(tree: ast.Module, dotted_of: Mapping[ast.expr, str]) -> Iterator[Finding]:
    """Of a file. `dotted_of`: the full names, torch's or ours, of expressions that name something of them."""
    named = {node: parts for node, dotted in dotted_of.items() if (parts := _ours(dotted)) is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.func in named:
            package, names, defined = named[node.func]
            yield from _told_call(node, package, names, defined)
    for scope in (node for node in ast.walk(tree) if isinstance(node, Scope)):
        yield from _told_methods(scope, named)
    methods = _known_by_name({package for package, _, _ in named.values()})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in methods:
            package, why = methods[node.attr]
            yield Finding(node.lineno, ast.unparse(node), why, PAGES[package])


Named = tuple[str, tuple[str, ...], Defined]


def _ours(dotted: str) -> Named | None:
    """The package of ours, the name in it, with a method's behind it, and where the name is defined."""
    parts = dotted.split(".")
    if parts[:2] == ["torch", "distributed"]:
        means = meaning(dotted)
        if not means.moves or means.name is None:
            return None
        package, names = means.ours or "", parts[means.num_parts :]
    else:
        num_parts = max((num for num in range(1, len(parts)) if ".".join(parts[:num]) in PAGES), default=0)
        package, names = ".".join(parts[:num_parts]), parts[num_parts:]
    defined = definition(package, names[0]) if 1 <= len(names) <= 2 else None
    return None if defined is None else (package, tuple(names), defined)


def _told_call(call: ast.Call, package: str, names: Sequence[str], defined: Defined) -> Iterator[Finding]:
    taken = takes(defined) if len(names) == 1 else method(defined, names[1])[1]
    if taken is not None:
        yield from _told_arguments(call, package, ".".join(names), taken)


def _told_arguments(call: ast.Call, package: str, name: str, taken: Takes) -> Iterator[Finding]:
    written = ast.unparse(call.func)
    for keyword in call.keywords:
        if keyword.arg is not None and not taken.any_name and keyword.arg not in taken.names:
            why = _why(package, f"{name}({keyword.arg})") or f"{package}'s {name} has no such argument"
            yield Finding(keyword.value.lineno, f"{written}({keyword.arg}=)", why, PAGES[package])
    is_counted = taken.num_positional is not None and not any(isinstance(value, ast.Starred) for value in call.args)
    if is_counted and len(call.args) > (taken.num_positional or 0):
        why = f"{package}'s {name} takes {taken.num_positional} without a name, not {len(call.args)}"
        yield Finding(call.lineno, f"{written}(...)", why, PAGES[package])


def _told_methods(scope: Scope, named: Mapping[ast.expr, Named]) -> Iterator[Finding]:
    """Of objects that stand under a name which the scope binds once, to a call of ours or by an annotation."""
    nodes = list(_within(scope))
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    kinds: dict[str, tuple[str, Defined]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.func in named:
            (target, *others), (package, names, defined) = node.targets, named[node.value.func]
            kind = returned(defined) if len(names) == 1 else None
            if kind is not None and not others and isinstance(target, ast.Name) and bound.count(target.id) == 1:
                kinds[target.id] = package, kind
    if not isinstance(scope, ast.Module):
        for argument in [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]:
            hint = argument.annotation
            if (
                hint is not None
                and hint in named
                and argument.arg not in bound
                and isinstance(named[hint][2].node, ast.ClassDef)
            ):
                kinds[argument.arg] = named[hint][0], named[hint][2]
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            package, kind = kinds[node.value.id]
            yield from _told_attribute(node, package, kind)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            package, kind = kinds.get(node.func.value.id, ("", None))
            taken = None if kind is None else method(kind, node.func.attr)[1]
            if kind is not None and taken is not None:
                yield from _told_arguments(node, package, f"{kind.node.name}.{node.func.attr}", taken)


def _told_attribute(node: ast.Attribute, package: str, kind: Defined) -> Iterator[Finding]:
    name = f"{kind.node.name}.{node.attr}"
    why = _why(package, name)
    if why is None and method(kind, node.attr)[0] is False and not node.attr.startswith("__"):
        why = f"{package}'s {kind.node.name} has no such attribute"
    if why is not None:
        yield Finding(node.lineno, ast.unparse(node), why, PAGES[package])


def _known_by_name(packages: set[str]) -> dict[str, tuple[str, str]]:
    """Methods that are not here, whatever they are called of: those whose names are long enough to be nobody else's."""
    methods = {}
    for (package, name), why in absent_names().items():
        _, is_method, method_name = name.partition(".")
        if package in packages and is_method and method_name.isidentifier() and method_name.count("_") > 1:
            methods[method_name] = package, why
    return methods


def _why(package: str, name: str) -> str | None:
    return absent_names().get((package, name))


def _within(scope: Scope) -> Iterator[ast.AST]:
    """The nodes of a scope that lie in no function or class within it."""
    to_see: list[ast.AST] = list(scope.body)
    while to_see:
        node = to_see.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            to_see += ast.iter_child_nodes(node)
