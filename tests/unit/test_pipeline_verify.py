"""The checks find what is wrong, and nothing else: every small change to small schedules is judged by them and by an
interpreter that knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disttrain.errors import ScheduleError
from disttrain.pipelining import Action, Op, Placement, Schedule, Wiring, from_csv, lower, make_schedule, verify
from disttrain.pipelining.schedule.verifier import find_problems
from tests.unit.pipeline_interpreter import is_right

SKIP_AND_TIE = Wiring(skips=((0, 2),), ties=((0, 3),))
SMALL = {
    "1f1b": lower(make_schedule("1F1B", 3, 2)),
    "1f1b of computations": make_schedule("1F1B", 3, 3),
    "gpipe, one unsharded": lower(make_schedule("GPipe", 2, 2), max_unsharded=1, num_ahead=0),
    "interleaved": lower(make_schedule("Interleaved1F1B", 2, 2), max_unsharded=2),
    "interleaved, wired": lower(make_schedule("Interleaved1F1B", 2, 2), wiring=SKIP_AND_TIE),
    "zbv": lower(make_schedule("ZBV", 2, 2)),
    "zbv of computations": make_schedule("ZBV", 2, 3),
    "zb-h2, wired": lower(make_schedule("ZB-H2", 4, 2), wiring=SKIP_AND_TIE),
    "dualpipev": lower(make_schedule("DualPipeV", 2, 4)),
    "forward only": lower(make_schedule("ForwardOnly", 2, 3, 2), wiring=SKIP_AND_TIE),
}

Ranks = list[list[Action]]


def _changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks: Ranks = [list(others) for others in schedule.ranks]
    ranks[rank] = actions
    return schedule.with_ranks(ranks)


def _dropped(schedule: Schedule) -> Iterator[Schedule]:
    for rank, actions in enumerate(schedule.ranks):
        for position in range(len(actions)):
            yield _changed(schedule, rank, [*actions[:position], *actions[position + 1 :]])


def _duplicated(schedule: Schedule) -> Iterator[Schedule]:
    """Right behind, at the end, and on the next rank."""
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            yield _changed(schedule, rank, [*actions[:position], action, *actions[position:]])
            yield _changed(schedule, rank, [*actions, action])
            other = (rank + 1) % schedule.num_ranks
            yield _changed(schedule, other, [*schedule.ranks[other], action])


def _swapped(schedule: Schedule) -> Iterator[Schedule]:
    for rank, actions in enumerate(schedule.ranks):
        for first in range(len(actions)):
            for second in range(first + 1, min(first + 5, len(actions))):
                changed = list(actions)
                changed[first], changed[second] = changed[second], changed[first]
                yield _changed(schedule, rank, changed)


def _altered(schedule: Schedule) -> Iterator[Schedule]:
    """Stages, microbatches and peers beyond the ends, and others within; other kinds."""
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            part = action.parts[-1]
            microbatches = [
                None,
                -1,
                schedule.num_microbatches,
                ((part.microbatch or 0) + 1) % schedule.num_microbatches,
            ]
            others = [
                *(
                    part._replace(stage=stage)
                    for stage in (-1, schedule.num_stages, (part.stage + 1) % schedule.num_stages)
                ),
                *(part._replace(microbatch=microbatch) for microbatch in microbatches),
                *(part._replace(peer=peer) for peer in (-1, schedule.num_stages, 0, 3) if part.peer is not None),
                *(part._replace(op=op) for op in (Op.FORWARD, Op.BACKWARD, Op.UNSHARD) if part.peer is None),
            ]
            for other in others:
                changed = action._replace(children=(*action.children[:-1], other)) if action.children else other
                yield _changed(schedule, rank, [*actions[:position], changed, *actions[position + 1 :]])


@pytest.mark.parametrize("mutate", [_dropped, _duplicated, _swapped, _altered])
@pytest.mark.parametrize("name", SMALL)
def test_every_small_change_is_judged_rightly(name: str, mutate: object) -> None:
    assert callable(mutate)
    schedule = SMALL[name]
    verify(schedule)
    assert is_right(schedule)
    num_wrong = 0
    for mutant in mutate(schedule):
        right = is_right(mutant)
        problems = find_problems(mutant)
        assert (not problems) == right, (problems[:1], [list(map(str, actions)) for actions in mutant.ranks])
        num_wrong += not right
    assert num_wrong > 0


def test_crossed_orders_are_found() -> None:
    """Each rank by itself is fine; together they wait for each other, or take one message for another."""
    schedule = from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n")
    with pytest.raises(ScheduleError, match="List the messages of a pair in the same order on both") as caught:
        verify(schedule)
    assert (caught.value.rank, caught.value.where) == (0, "action 1")


def test_a_deadlock_names_all_who_wait() -> None:
    ranks = [
        [Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0), Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 0, 1)],
        [Action(Op.FORWARD, 1, 1), Action(Op.BACKWARD, 1, 1), Action(Op.FORWARD, 1, 0), Action(Op.BACKWARD, 1, 0)],
    ]
    schedule = Schedule("Crossed", Placement.loop(2), 2, tuple(map(tuple, ranks)))
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    assert "rank 0 at action 1, 0B0, for 1I0 on rank 1; rank 1 at action 0, 1F1, for 0F1 on rank 0" in str(caught.value)


def test_sends_that_wait_in_a_circle_are_found() -> None:
    """Three ranks send at the same time, each to the next. With buffers it would not matter that they receive after."""
    schedule = lower(make_schedule("ForwardOnly", 3, 6, 2), num_ahead=0)
    verify(schedule)
    ranks = []
    for actions in schedule.ranks:
        late: list[Action] = []
        for action in actions:
            # Receives come first between two computations; put them after the sends.
            place = len(late)
            while action.op is Op.SEND_F and late[place - 1].op is Op.RECV_F:
                place -= 1
            late.insert(place, action)
        ranks.append(late)
    (problem,) = find_problems(schedule.with_ranks(ranks))
    assert problem.text.startswith(
        "All ranks that are not done wait for each other: rank 0 at action 7, 0SEND_F2, for rank 1 to reach 1RECV_F2"
    )
    assert not is_right(schedule.with_ranks(ranks))


@pytest.mark.parametrize(("bound", "least"), [("max_live", 4), ("max_pending", 4)])
def test_memory_has_bounds(bound: str, least: int) -> None:
    """ZB-H1 on 4 ranks: the first keeps 4 forwards, the last puts W off by 3 and has a fourth between I and W."""
    schedule = make_schedule("ZB-H1", 4, 8)
    verify(schedule, **{bound: least})
    with pytest.raises(ScheduleError, match=rf"{least - 1} are allowed\."):
        verify(schedule, **{bound: least - 1})


def test_more_problems_are_counted() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(from_csv("0F0,0F1,0B0\n"))
    assert "Stage 0 has F for microbatch 1; each microbatch needs one F, and one B or one I with one W." in str(
        caught.value
    )
