"""The pool of rank processes gets over what happens to its workers between and during calls."""

from __future__ import annotations

import pytest

import disttrain
from disttrain.testing import RankPool


def answer(value: int) -> int:
    return value + disttrain.get_rank()


def test_a_worker_that_died_and_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with RankPool() as pool:
        assert pool.run(1, answer, {"value": 1}) == [1]
        worker = pool._ranks[0].process
        worker.kill()
        worker.wait()
        assert pool.run(1, answer, {"value": 2}) == [2]
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_collect", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.run(1, answer, {"value": 3})
        # The answer to the interrupted call is not taken for this one's.
        assert pool.run(1, answer, {"value": 4}) == [4]
