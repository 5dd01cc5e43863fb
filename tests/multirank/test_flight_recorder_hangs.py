"""Real hangs over Gloo: the ranks' dumps are collected, and the analyzer names the rank and the line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import disttrain
from disttrain.errors import BackendError
from disttrain.flight_recorder import FlightRecorder, Kind, Verdict, analyze
from disttrain.testing import RankPool

HERE = Path(__file__)
WORLD_SIZE = 3
TIMEOUT_S = 2.0


def _line_of(text: str) -> int:
    """The line of this file that ends with the comment `# text`."""
    return next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def _diagnosis(folder: str) -> Verdict:
    analysis = analyze(Path(folder))
    assert [dump.rank for dump in analysis.dumps] == list(range(WORLD_SIZE))
    return analysis.verdicts[0]


def _recorded(folder: str, steps: Callable[[disttrain.ProcessGroup], None]) -> None:
    """Run `steps` on a connected group of all ranks, now with a short timeout, and dump, whether it fails or not."""
    world = disttrain.current_world()
    recorder = FlightRecorder()
    recorder.attach(world)
    group = world.new_group(timeout_s=60.0)
    assert isinstance(group, disttrain.ProcessGroup)
    disttrain.all_reduce(torch.ones(4), group=group)
    group.set_timeout(TIMEOUT_S)
    try:
        steps(group)
    except BackendError as error:
        recorder.dump(folder, "uncaught exception", error if disttrain.get_rank() != 1 else None)
    else:
        recorder.dump(folder, "exit")


def left_out_on_rank_1(folder: str) -> None:
    def steps(group: disttrain.ProcessGroup) -> None:
        if disttrain.get_rank() != 1:
            disttrain.all_reduce(torch.ones(4), group=group)  # left out

    _recorded(folder, steps)


def something_else_on_rank_1(folder: str) -> None:
    def steps(group: disttrain.ProcessGroup) -> None:
        if disttrain.get_rank() == 1:
            disttrain.barrier(group=group)  # something else
        else:
            disttrain.all_reduce(torch.ones(4), group=group)

    _recorded(folder, steps)


def no_send_on_rank_1(folder: str) -> None:
    def steps(group: disttrain.ProcessGroup) -> None:
        if disttrain.get_rank() == 0:
            disttrain.recv(torch.ones(4), group_src=1, group=group)  # no send
        disttrain.barrier(group=group)

    _recorded(folder, steps)


def all_is_well(folder: str) -> None:
    def steps(group: disttrain.ProcessGroup) -> None:
        for _ in range(20):
            disttrain.all_reduce(torch.ones(4), group=group)

    _recorded(folder, steps)


def test_a_rank_leaves_out_a_collective(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(WORLD_SIZE, left_out_on_rank_1, {"folder": str(tmp_path)})
    verdict = _diagnosis(str(tmp_path))
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (1,))
    assert f"{HERE.name}:{_line_of('left out')} in " in verdict.summary
    assert verdict.summary.endswith("its script has come to its end.")


def test_a_rank_calls_something_else(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(WORLD_SIZE, something_else_on_rank_1, {"folder": str(tmp_path)})
    verdict = _diagnosis(str(tmp_path))
    assert (verdict.kind, verdict.ranks) == (Kind.MISMATCHED_OPERATION, (1,))
    assert f"rank 1 barrier at {HERE}:{_line_of('something else')} in " in verdict.summary


def test_a_rank_does_not_send(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(WORLD_SIZE, no_send_on_rank_1, {"folder": str(tmp_path)})
    verdict = _diagnosis(str(tmp_path))
    assert (verdict.kind, verdict.ranks) == (Kind.MISSING_SEND, (1,))
    assert f"{HERE.name}:{_line_of('no send')} in " in verdict.summary


def test_a_healthy_job(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(WORLD_SIZE, all_is_well, {"folder": str(tmp_path)})
    assert _diagnosis(str(tmp_path)).kind is Kind.NOTHING_WRONG
