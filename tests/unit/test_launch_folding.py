"""Equal lines of several ranks become one, none is lost, and each rank's stay in their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_launch.output.streams.folding import HOLD_S, MAX_HELD, TELL_S, LineMerger, Repetitions, Said
from disttrain_launch.output.streams.merging import Merger
from disttrain_launch.output.terminal.screen import ranks_prefix
from tests.surroundings.terminal import Terminal

TRACEBACK = [b"Traceback (most recent call last):", b'  File "train.py", line 3', b"ValueError: bad batch"]


def everything(merger: LineMerger) -> list[Said]:
    return merger.due(float("inf"), ())


def said(*pairs: tuple[str, str]) -> list[Said]:
    return [(frozenset(map(int, ranks)), text.encode()) for ranks, text in pairs]


def test_what_all_say_is_one_line_at_once() -> None:
    merger = LineMerger()
    merger.put(0, [b"ready"], 0.0)
    assert merger.due(0.01, (0, 1)) == []
    merger.put(1, [b"ready"], 0.01)
    assert merger.due(0.01, (0, 1)) == said(("01", "ready"))
    assert merger.deadline_s is None


def test_nobody_is_waited_for_longer_than_the_time() -> None:
    merger = LineMerger()
    merger.put(2, [b"one", b"two"], 5.0)
    assert merger.deadline_s == 5.0 + HOLD_S
    assert merger.due(5.0 + HOLD_S, (0, 1, 2)) == said(("2", "one"), ("2", "two"))
    merger.put(1, [b"one"], 5.2)
    assert everything(merger) == said(("1", "one"))


def test_who_speaks_alone_is_not_held_up() -> None:
    merger = LineMerger()
    merger.put(0, [b"one", b"two"], 0.0)
    assert merger.due(0.0, (0,)) == said(("0", "one"), ("0", "two"))


def test_tracebacks_of_all_ranks_are_one_block_whatever_comes_between() -> None:
    merger = LineMerger()
    for rank in range(4):
        merger.put(rank, [b"rank %d is here" % rank, *TRACEBACK], 0.0)
    # Who came first had his own line first; the others' own lines come after what all say.
    firsts = [text for ranks, text in everything(merger) if ranks == {0}]
    assert firsts == [b"rank 0 is here", *TRACEBACK]
    for rank in range(4):
        merger.put(rank, TRACEBACK, 1.0)
    assert everything(merger) == [(frozenset(range(4)), line) for line in TRACEBACK]


def test_a_line_joins_none_that_stands_before_what_its_rank_said_already() -> None:
    merger = LineMerger()
    merger.put(0, [b"a", b"b", b"a"], 0.0)
    merger.put(1, [b"b", b"a", b"a"], 0.0)
    assert everything(merger) == said(("0", "a"), ("01", "b"), ("01", "a"), ("1", "a"))


def test_ranks_that_flood_the_screen_are_not_waited_for() -> None:
    merger = LineMerger()
    merger.put(0, [b"%d" % number for number in range(MAX_HELD + 10)], 0.0)
    assert len(merger.due(0.0, (0, 1))) == 10


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c"]), st.booleans()), max_size=40))
def test_each_ranks_lines_come_out_as_they_went_in(events: list[tuple[int, bytes, bool]]) -> None:
    merger = LineMerger()
    out: list[Said] = []
    for at, (rank, text, is_late) in enumerate(events):
        merger.put(rank, [text], at * 0.01)
        if is_late:
            out += merger.due(at * 0.01 + HOLD_S / 2, range(4))
    out += everything(merger)
    for rank in range(4):
        assert [text for ranks, text in out if rank in ranks] == [text for who, text, _ in events if who == rank]


@pytest.mark.parametrize(("num_more", "told"), [(0, []), (1, [("0", "again")]), (12, [("0", "(repeated 12 times)")])])
def test_repetitions_are_counted(num_more: int, told: list[tuple[str, str]]) -> None:
    repetitions = Repetitions()
    (again,) = said(("0", "again"))
    (other,) = said(("0", "other"))
    assert repetitions.pass_on(again, 0.0) == [again]
    for number in range(num_more):
        assert repetitions.pass_on(again, 1.0 + number) == []
    assert repetitions.deadline_s == (1.0 + TELL_S if num_more else None)
    assert repetitions.pass_on(other, 20.0) == [*said(*told), other]
    assert repetitions.deadline_s is None


def test_others_and_rulers_are_no_repetitions() -> None:
    repetitions = Repetitions()
    for one in said(("0", "a"), ("1", "a"), ("01", "a"), ("0", ""), ("0", ""), ("0", "----"), ("0", "----")):
        assert repetitions.pass_on(one, 0.0) == [one]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bar_waits_for_the_lines_before_it_and_a_question_for_its_rest() -> None:
    terminal, clock = Terminal(columns=60, num_rows=10), Clock()
    screen = terminal.screen()
    merger = Merger(screen, lambda ranks: ranks_prefix(ranks, {}, is_terminal=False), clock)
    first, second = merger.voice(0), merger.voice(1)
    first.show_lines(b"loading\n")
    first.show_bar(b"10%", is_bar=True)
    assert terminal.shown() == []
    second.show_lines(b"loading\n")
    assert terminal.shown() == ["[ranks 0, 1] loading", "[rank 0] 10%"]
    first.show_lines(b"100%\n")
    clock.now_s = HOLD_S
    merger.release()
    assert terminal.shown() == ["[ranks 0, 1] loading", "[rank 0] 100%"]
    first.show_bar(b"more? ", is_bar=False)
    assert len(terminal.shown()) == 2
    assert merger.deadline_s == 2 * HOLD_S
    clock.now_s = 2 * HOLD_S
    merger.release()
    assert terminal.shown()[-1] == "[rank 0] more?"


def test_when_one_stream_is_left_its_lines_come_at_once() -> None:
    terminal, clock = Terminal(columns=60, num_rows=10), Clock()
    merger = Merger(terminal.screen(), lambda ranks: ranks_prefix(ranks, {}, is_terminal=False), clock)
    first, second = merger.voice(0), merger.voice(1)
    first.show_lines(b"mine\n")
    assert terminal.shown() == []
    second.close()
    first.show_lines(b"mine\n" * 3)
    assert terminal.shown() == ["[rank 0] mine"]
    merger.flush()
    assert terminal.shown() == ["[rank 0] mine", "[rank 0] (repeated 3 times)"]


def test_a_question_is_seen_whatever_its_rank_says_on_the_other_stream() -> None:
    terminal, clock = Terminal(columns=60, num_rows=10), Clock()
    merger = Merger(terminal.screen(), lambda ranks: ranks_prefix(ranks, {}, is_terminal=False), clock)
    stdout, stderr = merger.voice(0), merger.voice(0)
    stdout.show_bar(b"more? ", is_bar=False)
    stderr.show_lines(b"warning 1\n")
    clock.now_s = HOLD_S
    merger.release()
    assert terminal.shown() == ["[rank 0] warning 1", "[rank 0] more?"]
    stderr.show_lines(b"warning 2\n")
    assert terminal.shown() == ["[rank 0] warning 1", "[rank 0] more?", "[rank 0] warning 2"]
    stdout.show_lines(b"more? yes\n")
    assert terminal.shown()[3:] == ["[rank 0] more? yes"]
