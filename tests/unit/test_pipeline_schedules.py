"""Every generator: right for all counts that it takes, as fast and lean as its paper says, one clear no to others."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import ScheduleError
from disttrain.pipelining import Costs, Op, Placement, Timeline, lower, make_schedule, peaks, simulate, verify
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS, find_schedule_kind
from disttrain.pipelining.schedules import forward_only

NAMES = [kind.name for kind in SCHEDULE_KINDS]
P, M = [1, 2, 3, 4, 8], [8, 16, 24]


@settings(max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    num_ranks=st.integers(1, 6),
    num_microbatches=st.integers(1, 20),
    stages=st.integers(1, 3),
)
def test_all_that_can_be_made_is_right(name: str, num_ranks: int, num_microbatches: int, stages: int) -> None:
    try:
        schedule = make_schedule(
            name, num_ranks, num_microbatches, stages if find_schedule_kind(name).any_stages else None
        )
    except ScheduleError:
        needs = {"DualPipeV": 2 * num_ranks, "Interleaved1F1B": 1, "InterleavedZeroBubble": 1}[name]
        assert num_microbatches < needs or num_microbatches % (num_microbatches // num_ranks)
        return
    verify(schedule)
    verify(lower(schedule))


def _run(name: str, num_ranks: int, num_microbatches: int, stages: int | None = None, **times: float) -> Timeline:
    return simulate(make_schedule(name, num_ranks, num_microbatches, stages), Costs(**times))


def _kept(timeline: Timeline) -> list[int]:
    return [peak.held for peak in timeline.peaks]


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("m", M)
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int) -> None:
    """(p - 1) / (m + p - 1), whatever F and B take (arXiv:2104.04473, section 2.2)."""
    timeline = _run(name, p, m, forward_s=3, backward_s=5)
    assert Fraction(round(timeline.makespan_s) - 8 * m, round(timeline.makespan_s)) == Fraction(p - 1, m + p - 1)
    assert _kept(timeline) == [m if name == "GPipe" else min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in P for m in M if m % p == 0])
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_interleaving_divides_the_bubble(name: str, p: int, m: int, v: int) -> None:
    """(p - 1) (F + B), with F and B of a v-th of a rank's layers, in rounds of p microbatches (arXiv:2104.04473,
    section 2.2)."""
    timeline = _run(name, p, m, v, forward_s=3, backward_s=5)
    assert timeline.makespan_s == 8 * (m * v + p - 1)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (4, 5, 3), (5, 5, 4)])
def test_zb_h1(p: int, f: int, i: int, w: int) -> None:
    """A bubble of (p - 1) (F + I - W), and no rank keeps more than 1F1B's first (arXiv:2401.10241, table 1)."""
    timeline = _run("ZB-H1", p, 3 * p, forward_s=f, backward_input_s=i, backward_weight_s=w)
    assert timeline.makespan_s == 3 * p * (f + i + w) + (p - 1) * (f + i - w)
    assert _kept(timeline) == [p] * p


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("m", [16, 32])
def test_zb_h2_and_zbv_never_wait(p: int, m: int) -> None:
    """No bubble between a rank's first and last action; 2 p - 1 and p microbatches kept (arXiv:2401.10241)."""
    h2, v = _run("ZB-H2", p, m), _run("ZBV", p, m)
    assert h2.idle_s == v.idle_s == (0,) * p
    assert [span[0].start_s for span in h2.compute] == [span[0].start_s for span in v.compute] == list(range(p))
    assert _kept(h2) == [2 * p - 1] * p
    assert _kept(v) == [2 * p] * p


@pytest.mark.parametrize("p", range(1, 13))
@pytest.mark.parametrize(
    ("name", "kept", "waits"),
    [("V-Half", lambda p: (p + 2) // 2, lambda p: 3 * p), ("V-Min", lambda p: (p + 4) // 3, lambda p: 4 * p)],
)
def test_v_half_and_v_min(name: str, kept: object, waits: object, p: int) -> None:
    """Memory (p + 2) // 2 and (p + 4) // 3 microbatches; bubbles of about p / 2 m and 2 p / 3 m, which are 3 p and 4 p
    units (arXiv:2405.15362, and the authors' table at huggingface.co/spaces/sail)."""
    assert callable(kept)
    assert callable(waits)
    timeline = _run(name, p, 2 * p)
    assert max(_kept(timeline)) <= 2 * kept(p)
    assert timeline.makespan_s - 12 * p <= waits(p)
    if p > 1:
        assert max(_kept(timeline)) == 2 * kept(p)


@pytest.mark.parametrize("p", P)
def test_dualpipev(p: int) -> None:
    """(p - 1) (F&B + B - 3 W) for ranks of a V, and 2 p + 1 stages' activations (github.com/deepseek-ai/DualPipe)."""
    timeline = _run("DualPipeV", p, 3 * p)
    assert timeline.makespan_s - 18 * p == (p - 1) * (3 + 2 - 3)
    assert max(_kept(timeline)) == 2 * p + 1


@pytest.mark.parametrize(
    "placement", [Placement.loop(4), Placement.loop(3, 2), Placement.v(4), Placement((0, 0, 1, 2, 1))]
)
def test_forwards_only_are_as_fast_as_can_be(placement: Placement) -> None:
    """The busiest rank's work, after the time until it begins and before the rest of the stages."""
    schedule = forward_only(placement, 12)
    verify(schedule)
    verify(lower(schedule))
    busiest = max(map(len, placement.stages))
    timeline = simulate(schedule)
    assert 12 * busiest <= timeline.makespan_s <= 12 * busiest + placement.num_stages - 1
    assert [peak.held for peak in peaks(schedule)] == [0] * placement.num_ranks


def test_names_may_be_written_in_many_ways() -> None:
    assert find_schedule_kind("zbv").name == find_schedule_kind("zbvZEROBUBBLE").name == "ZBVZeroBubble"
    assert find_schedule_kind("zb_h1").name == "ZB-H1"
    with pytest.raises(
        ScheduleError, match=r"no schedule 'intreleaved'\. Did you mean Interleaved1F1B\? There are GPipe, "
    ):
        make_schedule("intreleaved", 2, 4)


@pytest.mark.parametrize(
    ("name", "counts", "answer"),
    [
        ("GPipe", (0, 4), r"GPipe: num_ranks is 0; there must be one at least\. Give num_ranks >= 1\."),
        ("V-Min", (4, 0), "num_microbatches is 0"),
        ("Interleaved1F1B", (4, 8, -1), "stages_per_rank is -1"),
        (
            "1F1B",
            (4, 8, 2),
            r"1F1B: stages_per_rank is 2; it takes exactly 1 stage per rank\. Cut the model into 4 stages",
        ),
        (
            "ZBV",
            (4, 8, 1),
            r"it takes exactly 2 stages per rank\. Cut the model into 8 stages for 4 ranks, or choose one of",
        ),
        ("DualPipeV", (4, 7), r"num_microbatches is 7; .*, here 8\. Split the batch into 8 microbatches or more"),
        ("Interleaved1F1B", (4, 9), r"9, which 2 rounds of at least 4 .* Split the batch into 8 or 10 microbatches\."),
        ("InterleavedZeroBubble", (2, 7), r"Split the batch into 6 or 8 microbatches\."),
    ],
)
def test_counts_that_cannot_be(name: str, counts: tuple[int, ...], answer: str) -> None:
    with pytest.raises(ScheduleError, match=answer):
        make_schedule(name, *counts)


@pytest.mark.parametrize("name", NAMES)
def test_w_is_split_where_the_paper_splits_it(name: str) -> None:
    ops = {part.op for actions in make_schedule(name, 2, 4).ranks for action in actions for part in action.parts}
    splits = name in ("ZB-H1", "ZB-H2", "InterleavedZeroBubble", "ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV")
    assert (Op.BACKWARD_WEIGHT in ops) == splits
