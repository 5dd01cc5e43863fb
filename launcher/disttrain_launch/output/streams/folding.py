"""Equal lines of several ranks become one, and a line said again and again a number; pure.

A line is held for `HOLD_S`, or until all have said it. Who says the same meanwhile is written to its ranks, if nothing
held back comes between for him: so each rank's lines stay in their order, and no line comes before one that another
rank said earlier. A traceback of all ranks is folded line by line, and comes out as one block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

HOLD_S = 0.1
"""Who looks at a screen does not notice it; ranks that meet in collectives are less far apart."""
MAX_HELD = 2000
"""Lines; ranks that write faster are not waited for."""
TELL_S = 5.0
"""The time that repetitions are counted before they are told."""

Said = tuple[frozenset[int], bytes]
"""Ranks, and a line without its end."""


@dataclass(slots=True)
class _Held:
    number: int
    text: bytes
    since_s: float
    ranks: set[int]


def _number(line: _Held) -> int:
    return line.number


class LineMerger:
    """Lines of ranks in, lines with their ranks out. Times are of any one clock."""

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        self._by_text: dict[bytes, deque[_Held]] = {}
        self._last: dict[int, int] = {}
        """The number of each rank's last line."""
        self._num_lines = 0

    def put(self, rank: int, lines: Iterable[bytes], now_s: float) -> None:
        """Take what a rank has said."""
        last = self._last.get(rank, -1)
        for text in lines:
            alike = self._by_text.get(text)
            at = bisect_right(alike, last, key=_number) if alike is not None else 0
            if alike is not None and at < len(alike):
                line = alike[at]
                line.ranks.add(rank)
            else:
                line = _Held(self._num_lines, text, now_s, {rank})
                self._num_lines += 1
                self._held.append(line)
                if alike is None:
                    self._by_text[text] = deque((line,))
                else:
                    alike.append(line)
            last = line.number
        self._last[rank] = last

    def holds_of(self, rank: int) -> bool:
        """True when a line of this rank is still held back."""
        return bool(self._held) and self._last.get(rank, -1) >= self._held[0].number

    @property
    def deadline_s(self) -> float | None:
        """The time at which the next line is due."""
        return self._held[0].since_s + HOLD_S if self._held else None

    def due(self, now_s: float, everyone: Iterable[int]) -> list[Said]:
        """The lines that are due, in order. `everyone`: the ranks that may still say something."""
        speakers = set(everyone)
        said = []
        while self._held and (
            now_s >= self._held[0].since_s + HOLD_S or len(self._held) > MAX_HELD or self._held[0].ranks >= speakers
        ):
            line = self._held.popleft()
            alike = self._by_text[line.text]
            alike.popleft()
            if not alike:
                del self._by_text[line.text]
            said.append((frozenset(line.ranks), line.text))
        return said


class Repetitions:
    """Passes lines on, but says only how often where the same ranks say the same once more, with nothing between."""

    def __init__(self) -> None:
        self._last: Said | None = None
        self._num_more = 0
        self._since_s = 0.0

    def pass_on(self, said: Said, now_s: float) -> list[Said]:
        """The lines to show for this line."""
        # Empty lines and rulers are said again on purpose.
        if said == self._last and any(letter in _LETTERS for letter in said[1]):
            if not self._num_more:
                self._since_s = now_s
            self._num_more += 1
            return []
        repeats = self.tell()
        self._last = said
        return [*repeats, said]

    @property
    def deadline_s(self) -> float | None:
        """The time at which the count is due although no other line came."""
        return self._since_s + TELL_S if self._num_more else None

    def tell(self) -> list[Said]:
        """The number of repeats of the last line, as a line; the line itself where it was repeated once."""
        if self._last is None or not self._num_more:
            return []
        ranks, text = self._last
        words = text if self._num_more == 1 else b"(repeated %d times)" % self._num_more
        self._num_more = 0
        return [(ranks, words)]


_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") | frozenset(range(128, 256))
