"""Docstrings as this project writes them, for the site: `Args:` as a list, and what follows each label as it stands.

    Args:   output  (d0 / group_size, ...), contiguous;  input  (d0, ...), same dtype.
    Raises: ShapeError when they don't fit.

Names and what is said of them stand two spaces apart, and end in a semicolon. Griffe, which reads the code for
mkdocstrings, hands each docstring over: https://mkdocstrings.github.io/griffe/guide/users/extending/
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_LABEL = re.compile(r"(Args|Returns|Returns, raises|Raises|Collective|Yields|Errors):\s+")
_NAMES = re.compile(r"(?:^|;\s+)([`*\w]+(?:, [`*\w]+)*)  +(?=\S)", re.MULTILINE)
"""Where an argument begins: at a line's start, or behind a semicolon."""


def as_markdown(text: str) -> str:
    """`text` with its labelled parts as Markdown."""
    parts: list[str] = []
    plain: list[str] = []
    lines = text.splitlines()
    while lines:
        label = _LABEL.match(lines[0])
        if label is None:
            plain.append(lines.pop(0))
            continue
        said = [lines.pop(0)[label.end() :]]
        while lines and lines[0].startswith(" "):
            said.append(lines.pop(0).strip())
        parts += ["\n".join(plain).rstrip(), _labelled(label[1], "\n".join(said))]
        plain = []
    return "\n\n".join([part for part in [*parts, "\n".join(plain)] if part.strip()])


def _labelled(label: str, said: str) -> str:
    before, *entries = _NAMES.split(said)
    if not entries:
        return f"**{label}:** {' '.join(said.split())}"
    rows = [f"- `{name}`: {' '.join(text.split())}" for name, text in zip(entries[::2], entries[1::2], strict=True)]
    return "\n".join([f"**{label}:** {' '.join(before.split())}".rstrip(), "", *rows])


class Docstrings(griffe.Extension):
    """Changes each docstring once it has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
