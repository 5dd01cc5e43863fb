"""A notebook's move: its code cells are one program. What is not Python in them, magics and commands, stays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from disttrain.move.commands import told_commands
from disttrain.move.findings import Finding
from disttrain.move.source import Moved, move_source

_CELL = "# disttrain.move: cell"
_MAGIC = "# disttrain.move: magic"
_MASKED = re.compile(rf"^([ \t]*)(?:pass  )?{_MAGIC} ", re.MULTILINE)
_FORMS: tuple[dict[str, Any], ...] = tuple(
    {"indent": indent, "ensure_ascii": is_ascii} for indent in (1, 2, 4, None) for is_ascii in (False, True)
)


@dataclass(frozen=True)
class _Cell:
    """A cell of the notebook, whose `source` is a text or a list of lines; `code` is that text."""

    node: dict[str, Any]
    code: str

    def set(self, code: str) -> None:
        self.node["source"] = code.splitlines(keepends=True) if isinstance(self.node["source"], list) else code


def move_notebook(text: str) -> Moved:
    """Move what a notebook's cells import and use; the file's form stays. Of what cannot be read so, commands are told.

    Lines of findings are those of the file.
    """
    dumped = _form_of(text)
    if dumped is None:
        return _told(text)
    book, form, end = dumped
    cells = list(_code_cells(book))
    program = f"\n{_CELL}\n".join(_masked(cell.code) for cell in cells)
    moved = move_source(program)
    if any(finding.what == "the file" for finding in moved.findings):
        return _told(text)
    findings = _placed(moved.findings, program, text)
    parts = moved.text.split(f"\n{_CELL}\n")
    for cell, part in zip(cells, parts, strict=True):
        code = _MASKED.sub(r"\1", part)
        if code != cell.code:
            cell.set(code)
    after = json.dumps(book, **form) + end if moved.text != program else text
    commands = [command for command in told_commands(text) if not command.what.startswith("torch.distributed")]
    left = _placed(moved.told, moved.text, after)
    later = [command for command in told_commands(after) if not command.what.startswith("torch.distributed")]
    return Moved(after, tuple(sorted({*findings, *commands})), tuple(sorted({*left, *later})))


def _told(text: str) -> Moved:
    findings = told_commands(text)
    return Moved(text, findings, findings)


def _form_of(text: str) -> tuple[dict[str, Any], dict[str, Any], str] | None:
    """The notebook, how to write it so that the rest stays letter by letter, and what stands behind it."""
    try:
        book = json.loads(text)
    except ValueError:
        return None
    end = text[len(text.rstrip()) :]
    form = next((form for form in _FORMS if json.dumps(book, **form) + end == text), None)
    is_book = isinstance(book, dict) and isinstance(book.get("cells"), list)
    return (book, form, end) if form is not None and is_book else None


def _code_cells(book: dict[str, Any]) -> Iterator[_Cell]:
    for cell in book["cells"]:
        source = cell.get("source", "") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None
        if isinstance(source, str):
            yield _Cell(cell, source)
        elif isinstance(source, list) and all(isinstance(line, str) for line in source):
            yield _Cell(cell, "".join(source))


def _masked(code: str) -> str:
    """With comments in the place of what is IPython's: lines that begin with % or !, and cells that begin with %%."""
    lines = code.split("\n")
    if code.lstrip().startswith("%%"):
        return "\n".join(f"{_MAGIC} {line}" for line in lines)
    return "\n".join(_masked_line(line) for line in lines)


def _masked_line(line: str) -> str:
    bare = line.lstrip()
    indent = line[: len(line) - len(bare)]
    return f"{indent}pass  {_MAGIC} {bare}" if bare.startswith(("%", "!", "?")) else line


def _placed(findings: tuple[Finding, ...], program: str, text: str) -> Iterator[Finding]:
    """With the lines of the file in place of the program's: each stands there in turn, as JSON has it."""
    rows, at, lines = program.split("\n"), 0, {}
    for number, row in enumerate(rows, 1):
        written = json.dumps(_MASKED.sub(r"\1", row), ensure_ascii=False)[1:-1]
        start = text.find(written, at) if written.strip() and row != _CELL else -1
        if start >= 0:
            at = start + len(written)
        lines[number] = text.count("\n", 0, at) + 1
    for finding in findings:
        yield Finding(lines[finding.line], finding.what, finding.why, finding.page)
