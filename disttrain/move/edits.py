"""Changes of a text by the positions that `ast` gives: lines from 1, columns in bytes of UTF-8."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """`text` in place of what lies from `start` to `end`, counted in letters of the whole text."""

    start: int
    end: int
    text: str


class Text:
    """A file's text, and where its lines begin. Line ends stay what they are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = re.findall(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z", text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def place(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode() if line <= len(self._lines) else ""
        return self._starts[line - 1] + len(before)

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.stmt | ast.expr) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def before(self, node: ast.stmt) -> str:
        """The line in front of a statement: its indentation, or more."""
        return self.text[self._starts[node.lineno - 1] : self.span(node)[0]]

    def line_end(self) -> str:
        """As the first line has it."""
        match = re.search(r"\r\n|\n|\r", self.text)
        return "\n" if match is None else match[0]

    def num_new_lines(self, line: int, edits: Iterable[Edit]) -> int:
        """By how many a line of the text comes further down with these edits."""
        start = self.place(line, 0)
        before = [edit for edit in edits if edit.end <= start]
        return sum(_num_lines(edit.text) - _num_lines(self.text[edit.start : edit.end]) for edit in before)

    def whole_line(self, node: ast.stmt) -> tuple[int, int]:
        """A statement with its line end, where nothing else stands on its lines; else the statement alone."""
        start, end = self.span(node)
        rest = re.compile(r"[ \t]*(?:\r\n|\n|\r)").match(self.text, end)
        return (start, end) if rest is None or self.before(node) else (start, rest.end())


def _num_lines(text: str) -> int:
    return len(re.findall(r"\r\n|\n|\r", text))


def applied(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits, none of which lies over another."""
    parts, at = [], 0
    for edit in sorted(edits):
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])
