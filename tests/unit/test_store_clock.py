"""How far two clocks are apart, asked through a store."""

from __future__ import annotations

import itertools
import threading

import pytest

from disttrain.store import HashStore
from disttrain.store import clock as clock_module
from disttrain.store.clock import NUM_QUESTIONS, SPACING_S, SharedClock, ask_clock, serve_clock


def test_the_offset_is_that_of_the_quickest_answer() -> None:
    store = HashStore()
    served = store.clone()
    thread = threading.Thread(target=serve_clock, args=(served, lambda: 1000.0))
    thread.start()
    # Asked and answered at 100 and 104, 110 and 111, ...: the second is the quickest.
    times_s = itertools.chain([100.0, 104.0, 110.0, 111.0], itertools.count(120.0, 5.0))
    assert ask_clock(store, lambda: next(times_s)) == (1000.0 - 110.5, 0.5)
    assert store.queue_len("clock") == 0
    served.close()
    thread.join(60.0)
    assert not thread.is_alive()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "ANSWER_S", 0.01)
    assert ask_clock(HashStore()) is None


class AskedStore(HashStore):
    """Counts the questions to rank 0."""

    num_questions = 0

    def queue_push(self, key: str, value: object, *others: object, **named: object) -> None:
        AskedStore.num_questions += key == "clock"
        super().queue_push(key, value, *others, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_machines", [4, 32])
def test_one_rank_of_a_machine_asks_and_not_all_at_once(num_machines: int) -> None:
    AskedStore.num_questions = 0
    store = AskedStore()
    served = store.clone()
    thread = threading.Thread(target=serve_clock, args=(served,))
    thread.start()
    ranks = range(8 * num_machines)
    clocks = [SharedClock(store, rank, f"machine {rank // 8}", began_s=100.0) for rank in ranks]
    due = [[clock.look(100.0 + step * SPACING_S + 1e-9) for clock in clocks] for step in ranks]
    for step, answers in enumerate(due):
        assert [rank for rank, answer in enumerate(answers) if answer is not None] == [step]
    # All of a machine are told the same.
    told = [due[rank][rank] for rank in ranks]
    assert all(told[rank] == told[rank - rank % 8] for rank in ranks)
    assert AskedStore.num_questions == NUM_QUESTIONS * num_machines
    served.close()
    thread.join(60.0)


def test_an_unanswered_question_is_asked_again_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "ANSWER_S", 0.01)
    store = HashStore()
    clock = SharedClock(store, 1, "", began_s=0.0)
    assert [clock.look(now_s) for now_s in (0.0, 1.0, 1.005)] == [None] * 3
    served = store.clone()
    thread = threading.Thread(target=serve_clock, args=(served, lambda: 7.0))
    thread.start()
    assert clock.look(2.0) is not None
    assert clock.look(99.0) is None
    served.close()
    thread.join(60.0)
