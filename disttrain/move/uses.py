"""Finds a file's imports of torch's modules, and uses of their names. Names that functions bind anew are theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from disttrain.move.modules import PAGES
from disttrain.move.names import is_module

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Functions = tuple[Function, ...]
Statement = ast.Import | ast.ImportFrom
ROOT = "torch.distributed"


@dataclass(frozen=True)
class Use:
    """`a.b.c`, whose `a` is bound to a module: `nodes` are `a`, `a.b` and `a.b.c`; `dotted` its full name."""

    nodes: tuple[ast.expr, ...]
    root: str
    bound: str
    dotted: str
    functions: Functions

    def prefix(self, num_parts: int) -> ast.expr:
        """The node of the first `num_parts` parts of `dotted`."""
        return self.nodes[num_parts - len(self.bound.split("."))]


@dataclass(frozen=True)
class Imported:
    """A statement, and the functions that it lies in, from without."""

    node: Statement
    functions: Functions


@dataclass(frozen=True)
class Called:
    """A call of what imports name: `dotted`, in full."""

    node: ast.Call
    dotted: str
    functions: Functions


class Uses(ast.NodeVisitor):
    """All of a file."""

    def __init__(self, tree: ast.Module) -> None:
        self.bindings = {name: dotted for node in _imports(tree) for name, dotted in bound_modules(node)}
        self.names = _imported_names(tree)
        self.dotted: dict[ast.expr, str] = {}
        """The full names of expressions that are a module's attributes, or names that are imported from one."""
        self.uses: list[Use] = []
        self.imports: list[Imported] = []
        self.calls: list[Called] = []
        self._names = {name: dotted for node in _imports(tree) for name, dotted in _bound(node)}
        self.strings: list[tuple[ast.Constant, str]] = []
        self._functions: Functions = ()
        self._shadowed: frozenset[str] = frozenset()
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.append(Imported(node, self._functions))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.append(Imported(node, self._functions))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._enter(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter(node)

    def visit_Call(self, node: ast.Call) -> None:
        root, _, rest = ast.unparse(node.func).partition(".")
        if root in self._names and root not in self._shadowed:
            dotted = f"{self._names[root]}.{rest}" if rest else self._names[root]
            self.calls.append(Called(node, dotted, self._functions))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._use([node])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        nodes: list[ast.expr] = [node]
        while isinstance(nodes[-1], ast.Attribute):
            nodes.append(nodes[-1].value)
        if isinstance(nodes[-1], ast.Name):
            self._use(nodes[::-1])
        else:
            self.visit(nodes[-1])

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and ROOT in node.value:
            self.strings.append((node, node.value))

    def _use(self, nodes: list[ast.expr]) -> None:
        root = nodes[0]
        assert isinstance(root, ast.Name)
        bound = self.bindings.get(root.id)
        if bound is not None and root.id not in self._shadowed:
            names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
            self.uses.append(Use(tuple(nodes), root.id, bound, ".".join([bound, *names]), self._functions))
        imported = bound or self.names.get(root.id)
        if imported is not None and root.id not in self._shadowed:
            attributes = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
            self.dotted |= {node: ".".join([imported, *attributes[:num]]) for num, node in enumerate(nodes)}

    def _enter(self, node: Function) -> None:
        # Decorators, defaults and annotations are the outer scope's.
        arguments = node.args
        outer = [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]
        outer += [argument.annotation for argument in _arguments(arguments) if argument.annotation is not None]
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        if not isinstance(node, ast.Lambda):
            outer += [*node.decorator_list, *([node.returns] if node.returns is not None else [])]
        for expression in outer:
            self.visit(expression)
        before = self._functions, self._shadowed
        names, imported = _bound_names(node)
        self._functions, self._shadowed = (*self._functions, node), (self._shadowed - imported) | (names - imported)
        for each in body:
            self.visit(each)
        self._functions, self._shadowed = before


def bound_modules(node: Statement) -> Iterator[tuple[str, str]]:
    """Names that a statement binds to `torch`, to a module of torch.distributed's or to one of ours, and which."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if alias.asname is None and top in ("torch", "disttrain"):
                yield top, top
            elif alias.asname is not None and (alias.name in ("torch", *PAGES) or is_within(alias.name)):
                yield alias.asname, alias.name
    elif node.level == 0 and node.module is not None:
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            if dotted in PAGES or (is_within(dotted) and is_module(dotted)):
                yield alias.asname or alias.name, dotted


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Names imported from torch.distributed, its parts, and ours, that nothing else is bound to."""
    imported: dict[str, str] = {}
    others = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    others |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in _imports(tree):
        for alias in node.names:
            name, module = alias.asname or alias.name, getattr(node, "module", None) or ""
            is_known = isinstance(node, ast.ImportFrom) and not node.level and (is_within(module) or module in PAGES)
            dotted = f"{module}.{alias.name}"
            if not is_known or imported.get(name, dotted) != dotted:
                others.add(name)
            imported[name] = dotted
    return {name: dotted for name, dotted in imported.items() if name not in others and not dotted.endswith("*")}


def _bound(node: Statement) -> Iterator[tuple[str, str]]:
    """All names that a statement binds, and what each is in full."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif alias.asname is None:
            yield alias.name.partition(".")[0], alias.name.partition(".")[0]
        else:
            yield alias.asname, alias.name


def is_within(dotted: str) -> bool:
    """True for torch.distributed, and what is of it."""
    return f"{dotted}.".startswith(f"{ROOT}.")


def _imports(tree: ast.Module) -> Iterator[Statement]:
    return (node for node in ast.walk(tree) if isinstance(node, Statement))


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [*named, *(argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None)]


def _bound_names(function: Function) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a function binds, by whatever means, and those by imports; functions within it are apart."""
    names = {argument.arg for argument in _arguments(function.args)}
    imported: set[str] = set()
    to_see: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else list(function.body)
    while to_see:
        node = to_see.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, Statement):
            imported |= {name for name, _ in bound_modules(node)}
        elif isinstance(node, ast.Global | ast.Nonlocal):
            imported |= set(node.names)
        if not isinstance(node, Function | ast.ClassDef):
            to_see += ast.iter_child_nodes(node)
    return frozenset(names), frozenset(imported)
