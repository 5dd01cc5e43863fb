"""Between the streams of ranks and a screen: folds equal lines, puts the ranks before them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from disttrain_launch.output.streams.folding import HOLD_S, LineMerger, Repetitions, Said
from disttrain_launch.output.terminal.screen import Screen, prefixed


@dataclass(frozen=True)
class _Unfinished:
    voice: MergedVoice
    text: bytes
    is_bar: bool
    since_s: float


class Merger:
    """Merges the lines of several ranks for one screen. `prefix`: what stands before the lines of these ranks."""

    def __init__(
        self, screen: Screen, prefix: Callable[[frozenset[int]], bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._screen = screen
        self._prefix = prefix
        self._clock = clock
        self._lines = LineMerger()
        self._repetitions = Repetitions()
        self._voices: Counter[int] = Counter()
        self._waiting: _Unfinished | None = None
        """The lines that are not shown yet."""
        self._bar: _Unfinished | None = None
        """The lines that are on the screen."""
        self._is_whole = False
        """Its line has been finished since."""

    def voice(self, rank: int) -> MergedVoice:
        """For one more stream of this rank."""
        self._voices[rank] += 1
        return MergedVoice(self, rank)

    def end(self, rank: int) -> None:
        """One of its streams says nothing any more."""
        self._voices[rank] -= 1
        if not self._voices[rank]:
            del self._voices[rank]
        self.release()

    def hear(self, voice: MergedVoice, lines: bytes) -> None:
        """Whole lines, each with its newline."""
        # A question on one stream is asked, whatever its rank says on the other.
        if self._waiting is not None and self._waiting.voice is voice:
            self._waiting = None
        self._is_whole |= self._bar is not None and self._bar.voice is voice
        self._lines.put(voice.rank, lines[:-1].split(b"\n"), self._clock())
        self.release()

    def hear_bar(self, voice: MergedVoice, text: bytes, *, is_bar: bool) -> None:
        """A line that is not whole yet: a bar, a question, or the beginning of a line that is written in parts."""
        since_s = self._clock() if self._waiting is None else self._waiting.since_s
        self._waiting = _Unfinished(voice, text, is_bar, since_s)
        self.release()

    @property
    def deadline_s(self) -> float | None:
        """The time at which `release` is to be called, although nothing comes."""
        question_s = None if self._waiting is None else self._waiting.since_s + HOLD_S
        times_s = (self._lines.deadline_s, self._repetitions.deadline_s, question_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def release(self) -> None:
        """Show what is due."""
        now_s = self._clock()
        self._show(self._lines.due(now_s, self._voices))
        if (deadline_s := self._repetitions.deadline_s) is not None and now_s >= deadline_s:
            self._put(self._repetitions.tell())
        waiting = self._waiting
        if waiting is None or self._lines.holds_of(waiting.voice.rank):
            return
        # Whoever prints in parts would make the screen flicker: only what stays unfinished is a question.
        if waiting.is_bar or now_s >= waiting.since_s + HOLD_S:
            self._waiting, self._bar, self._is_whole = None, waiting, False
            prefix = self._prefix(frozenset((waiting.voice.rank,)))
            self._screen.show_bar(prefix, waiting.text, now_s, is_bar=waiting.is_bar)

    def flush(self) -> None:
        """Show all that is held: what follows comes after it."""
        self._show(self._lines.due(float("inf"), ()))
        self._put(self._repetitions.tell())

    def _show(self, due: Iterable[Said]) -> None:
        now_s = self._clock()
        self._put([shown for said in due for shown in self._repetitions.pass_on(said, now_s)])

    def _put(self, shown: list[Said]) -> None:
        if not shown:
            return
        bar = self._bar
        ends_bar = bar is not None and any(bar.voice.rank in ranks for ranks, _ in shown)
        if ends_bar and not self._is_whole:
            self._screen.leave_question()
        groups = [(ranks, [text for _, text in said]) for ranks, said in groupby(shown, key=lambda said: said[0])]
        lines = [prefixed(self._prefix(ranks), b"\n".join(texts) + b"\n") for ranks, texts in groups]
        self._screen.show_lines(b"".join(lines), ends_bar=ends_bar)
        if ends_bar:
            self._bar = None


@dataclass(frozen=True, eq=False)
class MergedVoice:
    """One stream's way to the screen, through a merger."""

    merger: Merger
    rank: int

    def show_lines(self, lines: bytes) -> None:
        self.merger.hear(self, lines)

    def show_bar(self, text: bytes, *, is_bar: bool) -> None:
        self.merger.hear_bar(self, text, is_bar=is_bar)

    def close(self) -> None:
        self.merger.end(self.rank)
