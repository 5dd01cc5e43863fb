"""How much of a step ranks wait for each other, beside what a stopwatch around each call says."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest
import torch

import disttrain
from disttrain.flight_recorder import StepSummaries, enable
from disttrain.testing import RankPool

NUM_STEPS = 10


def _compute(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _steps() -> tuple[float, dict[str, Any]]:
    """One rank's share of time within calls by a stopwatch; on rank 0 with the summary of all ranks."""
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    rank = disttrain.get_rank()
    disttrain.barrier()
    summaries = StepSummaries(enable(), heard.put, every_steps=NUM_STEPS)
    began_s, waited_s = time.perf_counter(), 0.0
    for _ in range(NUM_STEPS):
        hidden = disttrain.all_reduce(torch.ones(64), async_op=True)
        _compute(0.03)
        late = disttrain.all_reduce(torch.ones(64), async_op=True)
        _compute(0.06 if rank else 0.015)
        before_s = time.perf_counter()
        assert hidden is not None
        assert late is not None
        hidden.wait()
        late.wait()
        disttrain.barrier()
        waited_s += time.perf_counter() - before_s
        summaries.step()
    share = waited_s / (time.perf_counter() - began_s)
    summary = {} if rank else heard.get(timeout=60)
    disttrain.barrier()
    summaries.close()
    return share, summary


@pytest.mark.sweep(1)
@pytest.mark.parametrize("world_size", [2, 1])
def test_the_share_is_a_stopwatch_s(rank_pool: RankPool, world_size: int) -> None:
    found = rank_pool.run(world_size, _steps)
    summary = found[0][1]
    if world_size == 1:
        assert (summary["waiting_share"], summary["communication_share"], summary["communication_s"]) == (0, 0, {})
        return
    shares = [share for share, _ in found]
    assert summary["waiting_share"] == pytest.approx(sum(shares) / 2, abs=0.03)
    assert 0.1 < summary["waiting_share"] < summary["communication_share"] - 0.2
