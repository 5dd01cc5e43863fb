"""Plans what becomes of one import statement: other statements in its place, and what is left to a person."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from disttrain.move.findings import Finding, Reason
from disttrain.move.names import meaning
from disttrain.move.uses import Statement, is_within

STAR = Reason("Which names are meant is not said: write them out", "docs/moving_over.md#imports")


@dataclass(frozen=True)
class KeptUses:
    """Uses of the name `torch` that a file keeps: parts of torch.distributed that are left there, and others."""

    of_distributed: bool
    other: bool


@dataclass(frozen=True)
class Plan:
    """`statements` in its place, none where it stays; or only another module's name, `module`."""

    statements: tuple[str, ...] = ()
    module: str | None = None
    findings: tuple[Finding, ...] = ()


def plan_import(node: Statement, uses: KeptUses) -> Plan:
    """Of a statement; one that does not ask for torch.distributed stays as it is."""
    return _plan_plain(node, uses) if isinstance(node, ast.Import) else _plan_from(node)


def _plan_plain(node: ast.Import, uses: KeptUses) -> Plan:
    moved: list[str] = []
    staying: list[ast.alias] = []
    findings: list[Finding] = []
    for alias in node.names:
        means = meaning(alias.name) if is_within(alias.name) else None
        if means is not None and means.left is not None:
            findings.append(finding(node.lineno, alias.name, means.left))
        if means is None or not means.moves or means.name is not None:
            staying.append(alias)
        elif alias.asname is not None:
            moved.append(f"import {means.ours}" + (f" as {alias.asname}" if alias.asname != means.ours else ""))
        elif uses.of_distributed:
            staying.append(alias)
        else:
            moved += ["import torch"] if uses.other else []
            moved.append("import disttrain")
    if not moved:
        return Plan(findings=tuple(findings))
    stays = [f"import {', '.join(map(ast.unparse, staying))}"] if staying else []
    return Plan((*stays, *dict.fromkeys(moved)), findings=tuple(findings))


def _plan_from(node: ast.ImportFrom) -> Plan:
    module = node.module or ""
    if node.level or not (module == "torch" or is_within(module)):
        return Plan()
    moved: dict[str, list[ast.alias]] = {}
    modules: list[str] = []
    staying: list[ast.alias] = []
    findings: list[Finding] = []
    for alias in node.names:
        dotted = f"{module}.{alias.name}"
        if not is_within(dotted):
            staying.append(alias)
        elif alias.name == "*":
            findings.append(finding(node.lineno, dotted, STAR))
            staying.append(alias)
        else:
            means = meaning(dotted)
            if means.left is not None:
                findings.append(finding(alias.lineno, dotted, means.left))
            if not means.moves:
                staying.append(alias)
            elif means.name is None:
                modules.append(_of_module(means.ours or "", alias.asname or alias.name))
            else:
                moved.setdefault(means.ours or "", []).append(alias)
    if not moved and not modules:
        return Plan(findings=tuple(findings))
    if len(moved) == 1 and not modules and not staying:
        return Plan(module=next(iter(moved)))
    statements = [_of_names(module, staying)] if staying else []
    statements += [*modules, *(_of_names(package, aliases) for package, aliases in moved.items())]
    return Plan(tuple(statements), findings=tuple(findings))


def finding(line: int, written: str, reason: Reason) -> Finding:
    return Finding(line, written, reason.why, reason.page)


def needed_torch(imports: Iterator[Statement]) -> bool:
    """True when none of these statements binds `torch` otherwise than by torch.distributed."""
    plain = (alias for node in imports if isinstance(node, ast.Import) for alias in node.names)
    return not any(
        alias.name.partition(".")[0] == "torch" and alias.asname is None and not is_within(alias.name)
        for alias in plain
    )


def _of_module(package: str, bound: str) -> str:
    parent, _, last = package.rpartition(".")
    first = f"from {parent} import {last}" if parent else f"import {last}"
    return first if bound == last else f"{first} as {bound}"


def _of_names(module: str, aliases: list[ast.alias]) -> str:
    return f"from {module} import {', '.join(map(ast.unparse, aliases))}"
