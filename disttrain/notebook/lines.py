"""Makes lines of a rank's output that stay readable where they are stored: nothing in them moves a cursor. Pure."""

from __future__ import annotations

import codecs
import re
from typing import Final

BAR_INTERVAL_S: Final = 10.0
"""The interval at which a line that overwrites itself, such as a progress bar, is shown before it is whole."""

_COLOUR = r"\x1b\[[0-9;:]*m"
_NO_COLOUR = "\x1b[0m"
_INVISIBLE = re.compile(
    rf"({_COLOUR})"
    # Sequences with parameters, texts for the terminal itself, others, and what stands alone.
    r"|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-Z\\`-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f]"
)


class LineReader:
    """Cuts one stream into lines, each as it was last seen: of `10%\\r20%\\rdone\\n`, `done`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._bar_since_s: float | None = None
        """When the unfinished line was last shown, or began to overwrite itself."""

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """The lines that `data` completes, and now and then the state of a bar."""
        *lines, rest = (self._rest + self._decoder.decode(data)).split("\n")
        if lines:
            self._bar_since_s = None
        self._rest = _overwritten(rest)
        if "\r" in rest:
            if self._bar_since_s is None:
                self._bar_since_s = now_s
            elif now_s - self._bar_since_s >= BAR_INTERVAL_S:
                self._bar_since_s = now_s
                lines.append(rest)
        return [plain(line) for line in lines]

    def end(self) -> list[str]:
        """The line that was never finished, if there is something to see of it."""
        rest = plain(self._rest + self._decoder.decode(b"", final=True))
        self._rest = ""
        return [rest] if rest else []


def plain(line: str) -> str:
    """Returns what a terminal would show of `line` in the end, with its colours."""
    shown = _INVISIBLE.sub(lambda match: match[1] or "", _overwritten(line).rstrip("\r"))
    colours = re.findall(_COLOUR, shown)
    # A stored line's colour would go on in those after it.
    return shown + _NO_COLOUR if colours and colours[-1] not in (_NO_COLOUR, "\x1b[m") else shown


def _overwritten(line: str) -> str:
    """Without what returns have overwritten; one at its end has overwritten nothing yet."""
    body = line.rstrip("\r")
    return body.rpartition("\r")[2] + "\r" * (body != line)
