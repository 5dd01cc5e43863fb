"""Text of workers for a terminal that others share: its width, and itself without what would move the cursor; pure."""

from __future__ import annotations

import re
import unicodedata

_HARMFUL = re.compile(
    # Kept: colours, erasing within the line, the cursor hidden or shown, and links that end.
    rb"(\x1b\[[0-9;:]*[mK]|\x1b\[\?25[hl]|\x1b\]8;[^\x07\x1b\n]*(?:\x07|\x1b\\))"
    # Sequences with parameters, texts for the terminal itself, others, and what stands alone.
    rb"|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-Z\\`-~]?"
    rb"|\xc2[\x80-\x9f]|[\x00-\x06\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_SUSPICIOUS = re.compile(rb"[\x00-\x06\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
_NO_WIDTH = frozenset({"Mn", "Me", "Cf"})
_ESCAPES = re.compile(r"(\x1b\[[0-9;:?]*[A-Za-z])")
_LINKS = re.compile(r"\x1b\]8;[^\x07\x1b\n]*(?:\x07|\x1b\\)")


def harmless(text: bytes) -> bytes:
    """`text` without escape sequences that leave the line: a table below it would be drawn over others' lines."""
    if _SUSPICIOUS.search(text) is None:
        return text
    return _HARMFUL.sub(lambda match: match[1] or b"", text)


def width(line: bytes) -> int:
    """In columns."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: bytes, columns: int) -> bytes:
    """The beginning of a `harmless` line; escape sequences take no room, and colours must end."""
    columns_left = columns
    parts = []
    for part in _ESCAPES.split(_LINKS.sub("", text.decode("utf-8", "replace")).replace("\t", " ")):
        if part.startswith("\x1b"):
            parts.append(part)
            continue
        for letter in part:
            columns_left -= _columns(letter)
            if columns_left < 0:
                break
            parts.append(letter)
    return "".join(parts).encode()


def _columns(letter: str) -> int:
    if letter.isascii():
        return 1
    if unicodedata.category(letter) in _NO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
