"""All ranks are told to stop at the same step, whoever was told first and wherever the others are."""

from __future__ import annotations

import random
import threading
import time

import pytest

import disttrain
from disttrain.testing import run_threads

NUM_STEPS = 200


def _stopped_at(seed: int) -> int | None:
    """Steps that end at random times, in which one rank asks for a stop; the number of the last one."""
    rank, draw = disttrain.get_rank(), random.Random(seed)
    culprit, step = draw.randrange(disttrain.get_world_size()), draw.randrange(20)
    own = random.Random(seed * 10 + rank)
    stopping = disttrain.current_world().stopping
    stopping.prepare()
    for number in range(NUM_STEPS):
        time.sleep(own.random() * 0.002)
        if (rank, number) == (culprit, step):
            threading.Thread(target=stopping.request, args=("a test",)).start()
        if stopping.is_requested():
            assert stopping.is_requested()
            return number
    return None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_stop_after_the_same_step(world_size: int) -> None:
    for seed in range(5):
        steps = run_threads(world_size, _stopped_at, seed)
        assert len(set(steps)) == 1
        assert steps[0] is not None


def _left_behind() -> bool:
    stopping = disttrain.current_world().stopping
    stopping.prepare()
    disttrain.barrier()
    if disttrain.get_rank() == 0:
        return False
    time.sleep(0.2)
    stopping.request("too late")
    return stopping.is_requested()


def test_who_is_last_is_not_stopped() -> None:
    assert run_threads(2, _left_behind) == [False, False]


def test_who_asks_outside_a_job_gets_an_answer() -> None:
    with pytest.raises(disttrain.DistError, match="not a rank of any job"):
        disttrain.stop_requested()
