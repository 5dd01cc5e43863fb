"""Shows the ranks' stacks as columns: the ranks to blame side by side, then the rest, those with equal stacks together.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.wording import call_text
from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import Stack, ThreadStack, ranks_text
from disttrain.flight_recorder.views.data import LIBRARY, OURS, OWN, whose
from disttrain.flight_recorder.views.words import doing

MAX_OTHERS: Final = 12
_EMPTY: Final = '<article class="card blamed" data-ranks="{}"><h3>{}</h3><p>no dump: nobody knows</p></article>'
_CLASSES: Final = {OWN: "own", LIBRARY: "library", OURS: "ours"}


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads were at one place, or that died of one exception; `dump` is that of the first.

    `doing` says what they do, or in which call they wait.
    """

    ranks: tuple[int, ...]
    dump: Dump
    doing: str
    is_blamed: bool


def stack_groups(dumps: Sequence[Dump], waits: Sequence[Wait], blamed: Collection[int]) -> list[StackGroup]:
    """The blamed first, then by the number of ranks."""
    waiting = {wait.rank: f"waits in {call_text(wait.record)}" for wait in reversed(waits)}
    alike: dict[tuple[bool, str, Stack], list[Dump]] = {}
    for dump in dumps:
        text = waiting.get(dump.rank) if dump.failure is None else None
        alike.setdefault((dump.rank in blamed, text or doing(dump), _main_stack(dump)), []).append(dump)
    groups = [
        StackGroup(tuple(dump.rank for dump in alike_dumps), alike_dumps[0], text, is_blamed)
        for (is_blamed, text, _), alike_dumps in alike.items()
    ]
    return sorted(groups, key=lambda group: (not group.is_blamed, -len(group.ranks), group.ranks))


def draw_stacks(groups: Sequence[StackGroup], without_dump: Sequence[int] = ()) -> str:
    """HTML: a card for each group, and one for those to blame that have no dump."""
    blamed = [group for group in groups if group.is_blamed]
    others = [group for group in groups if not group.is_blamed]
    cards = [_card(group) for group in [*blamed[:MAX_OTHERS], *others[:MAX_OTHERS]]]
    left_out = len(groups) - len(cards)
    if without_dump:
        cards.insert(0, _EMPTY.format(" ".join(map(str, without_dump)), ranks_text(without_dump)))
    note = f'<p class="note">{left_out} more groups of ranks are left out.</p>' if left_out else ""
    return f'<div class="cards">{"".join(cards)}</div>{note}'


def _card(group: StackGroup) -> str:
    dump = group.dump
    stack = _main_stack(dump)
    lines = "".join(_frames(dump, stack)) or "<li>no Python stack</li>"
    kind = " blamed" if group.is_blamed else ""
    others = "".join(_thread(dump, thread) for thread in dump.threads if not thread.is_main)
    if others:
        others = f"<details><summary>its other threads</summary>{others}</details>"
    return (
        f'<article class="card{kind}" data-ranks="{" ".join(map(str, group.ranks))}">'
        f"<h3>{escape(ranks_text(group.ranks))}</h3><p>{escape(group.doing)}</p>"
        f'<ol class="stack">{lines}</ol>{others}</article>'
    )


def _thread(dump: Dump, thread: ThreadStack) -> str:
    title = f"{thread.name}, which has failed: {thread.failure}" if thread.failure else thread.name
    return f'<h4>{escape(title)}</h4><ol class="stack">{"".join(_frames(dump, thread.stack))}</ol>'


def _frames(dump: Dump, stack: Stack) -> Iterator[str]:
    for frame in stack:
        folder, slash, name = frame.file.rpartition("/")
        location = f"<span><i>{escape(folder + slash)}</i>{escape(name)}:{frame.line}</span>"
        yield f'<li class="{_CLASSES[whose(dump, frame)]}"><b>{escape(frame.function)}</b> {location}</li>'


def _main_stack(dump: Dump) -> Stack:
    return dump.failure.stack if dump.failure is not None else dump.main_stack
