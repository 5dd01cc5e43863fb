"""How far two clocks are apart, asked through a store."""

from __future__ import annotations

import itertools
import threading

import pytest

from disttrain.store import HashStore
from disttrain.store import clock as clock_module
from disttrain.store.clock import ask_clock, serve_clock


def test_the_offset_is_that_of_the_quickest_answer() -> None:
    store = HashStore()
    served = store.clone()
    thread = threading.Thread(target=serve_clock, args=(served, lambda: 1000.0))
    thread.start()
    # Asked and answered at 100 and 104, 110 and 111, ...: the second is the quickest.
    times_s = itertools.chain([100.0, 104.0, 110.0, 111.0], itertools.count(120.0, 5.0))
    assert ask_clock(store, lambda: next(times_s)) == (1000.0 - 110.5, 0.5)
    assert store.list_keys() == []
    served.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "ANSWER_S", 0.01)
    assert ask_clock(HashStore()) is None
