"""A file's move, from its text to its new text and to what is left: nothing is read, imported or run."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass, replace

from disttrain.move.calls import told_calls
from disttrain.move.edits import Edit, Text, applied
from disttrain.move.findings import Finding, Reason
from disttrain.move.groups import edits_of
from disttrain.move.imports import KeptUses, finding, needed_torch, plan_import
from disttrain.move.names import left_of_ours, meaning
from disttrain.move.uses import Functions, Imported, Use, Uses, is_within

_STRING = Reason("A name in a string is not changed", "docs/moving_over.md#what-is-left-to-you")
_UNREAD = "docs/moving_over.md#what-is-left-to-you"
_IN_STRINGS = re.compile(r"torch\.distributed(?:\.\w+)+|\Atorch\.distributed\Z")
_MENTIONS = re.compile(
    r"\bdisttrain\b|\.\s*distributed\b|\bfrom\s+torch\s+import\b|DistributedDataParallel"
)  # else it need not be parsed
_LINE_LETTERS = 120


@dataclass(frozen=True)
class Moved:
    """The new text, and what is left to a person, from above; `told` with the lines of the new text."""

    text: str
    findings: tuple[Finding, ...]
    told: tuple[Finding, ...] = ()


def move_source(text: str) -> Moved:
    """Move a file of Python. What is not an import of torch.distributed, or a use of one, stays letter by letter."""
    if not _MENTIONS.search(text):
        return Moved(text, ())
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        findings = (Finding(line, "the file", f"It is no Python: {error}", _UNREAD),)
        return Moved(text, findings, findings)
    return _Mover(text, tree).moved()


class _Mover:
    def __init__(self, text: str, tree: ast.Module) -> None:
        self.text = Text(text)
        self.tree = tree
        self.uses = Uses(tree)
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        self.needing: dict[str, list[Functions]] = {"disttrain": [], "torch": []}  # where uses lie that now begin so
        self.at_top: set[str] = set()  # statements that stand there now
        self.bound: list[Imported] = []  # statements that bind that name

    def moved(self) -> Moved:
        keeps = False
        for use in self.uses.uses:
            if is_within(use.dotted):
                keeps |= self._move_use(use)
            elif (left := left_of_ours(use.dotted)) is not None:  # moved before
                named = use.prefix(left[0])
                self.findings.append(finding(named.lineno, ast.unparse(named), left[1]))
        other = any(not is_within(use.dotted) and use.root == "torch" for use in self.uses.uses)
        kept_uses = KeptUses(keeps, other and needed_torch(statement.node for statement in self.uses.imports))
        for statement in self.uses.imports:
            self._move_import(statement, kept_uses)
        self.findings += told_calls(self.tree, self.uses.dotted)
        for call in self.uses.calls:
            edits = list(edits_of(call.node, call.dotted, self.text))
            self.edits += edits
            self.needing["disttrain"] += [call.functions] * bool(edits)
        self._import("disttrain", self.bound)
        self._import("torch", [statement for statement in self.uses.imports if _binds_torch(statement)])
        for node, value in self.uses.strings:
            self._tell_string(node, value)
        findings = sorted(set(self.findings))
        told = (replace(each, line=each.line + self.text.num_new_lines(each.line, self.edits)) for each in findings)
        return Moved(applied(self.text.text, self.edits), tuple(findings), tuple(told))

    def _move_use(self, use: Use) -> bool:
        """Returns whether it stays a use of `torch`."""
        means, root = meaning(use.dotted), meaning(use.bound) if is_within(use.bound) else None
        if root is not None and not root.moves:
            return False  # its import is told of, or all stays torch's
        prefix = use.prefix(means.num_parts)
        if means.left is not None:
            written = use.nodes[min(use.nodes.index(prefix) + (means.name is not None), len(use.nodes) - 1)]
            self.findings.append(finding(written.lineno, ast.unparse(written), means.left))
        elif means.ours is None and root is not None:
            self.edits.append(Edit(*self.text.span(use.nodes[0]), use.bound))
            self.needing["torch"].append(use.functions)
            return True
        if not means.moves:
            return root is None
        assert means.ours is not None
        base = None if root is None else root.ours
        if base is not None and f"{means.ours}.".startswith(f"{base}."):
            new = use.root + means.ours.removeprefix(base)
        else:
            new = means.ours
            self.needing["disttrain"].append(use.functions)
        if new != self.text.of(prefix):
            self.edits.append(Edit(*self.text.span(prefix), new))
        return False

    def _move_import(self, statement: Imported, uses: KeptUses) -> None:
        plan = plan_import(statement.node, uses)
        self.findings += plan.findings
        if plan.module is not None:
            start, _ = self.text.span(statement.node)
            named = re.match(r"from\s+(?:\\\s+)?([\w.]+)", self.text.of(statement.node))
            assert named is not None
            self.edits.append(Edit(start + named.start(1), start + named.end(1), plan.module))
        elif plan.statements and statement.node in self.tree.body and self.at_top.issuperset(plan.statements):
            self.edits.append(Edit(*self.text.whole_line(statement.node), ""))
        elif plan.statements:
            self.at_top |= set(plan.statements) if statement.node in self.tree.body else set()
            self.edits.append(Edit(*self.text.span(statement.node), self._written(statement.node, plan.statements)))
        if "import disttrain" in plan.statements or ast.unparse(statement.node) == "import disttrain":
            self.bound.append(statement)

    def _written(self, node: ast.stmt, statements: tuple[str, ...]) -> str:
        """One to a line, where the old one had its line alone; comments within it come behind the last."""
        indent = self.text.before(node)
        end = self.text.span(node)[1]
        if indent.strip() or self.text.text[end:].lstrip(" \t").startswith(";"):
            return "; ".join(statements)
        line_end = self.text.line_end()
        lines = [_wrapped(statement, indent, line_end) for statement in statements]
        comments = _comments(self.text.of(node))
        return f"{line_end}{indent}".join(lines) + ("  " + "  ".join(comments) if comments else "")

    def _import(self, name: str, bound: list[Imported]) -> None:
        """At the top, where uses need it that lie in no function that has it; `bound`: the statements that bind it."""
        where = {id(each.functions[-1]) if each.functions else None for each in bound}
        top = any(each.node in self.tree.body for each in bound)
        if top or all(any(id(function) in where for function in functions) for functions in self.needing[name]):
            return
        start = self.text.place(_first_line(self.tree), 0)
        self.edits.append(Edit(start, start, f"import {name}{self.text.line_end()}"))

    def _tell_string(self, node: ast.Constant, value: str) -> None:
        for match in _IN_STRINGS.finditer(value):
            line = node.lineno + value[: match.start()].count("\n")
            self.findings.append(finding(min(line, node.end_lineno or line), f'"{match[0]}"', _STRING))


def _binds_torch(statement: Imported) -> bool:
    plain = statement.node.names if isinstance(statement.node, ast.Import) else []
    return any(alias.asname is None and alias.name.partition(".")[0] == "torch" for alias in plain)


def _first_line(tree: ast.Module) -> int:
    """Of the first statement behind the docstring and what is imported from the future."""
    for index, node in enumerate(tree.body):
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and getattr(node, "module", None) != "__future__":
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            return min([node.lineno, *(decorator.lineno for decorator in decorators)])
    raise AssertionError


def _wrapped(statement: str, indent: str, line_end: str) -> str:
    head, found_import, names = statement.partition(" import ")
    if len(indent) + len(statement) <= _LINE_LETTERS or not found_import:
        return statement
    rows = "".join(f"{indent}    {name},{line_end}" for name in names.split(", "))
    return f"{head} import ({line_end}{rows}{indent})"


def _comments(statement: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(statement).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]
