"""What is seen of a job: in the store, as a table, as JSON; and what its event log says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disttrain.errors import LaunchError
from disttrain.store import HashStore
from disttrain_launch.output.event_log import EventLog
from disttrain_launch.output.events import Chronicle, Record, happened
from disttrain_launch.output.terminal.table import drawn, table_of
from disttrain_launch.output.view import (
    JobNode,
    JobState,
    NodeState,
    Sight,
    WorkerState,
    combined,
    look,
    tell_job,
    tell_node,
)
from disttrain_launch.rendezvous.messages import Came, Ended, Stopped
from disttrain_launch.rendezvous.rounds import Node, Phase, Terms
from disttrain_launch.rendezvous.state import Event, NodeLost, Rendezvous
from disttrain_launch.request.whereabouts import Address, addresses_here, leave_note
from disttrain_launch.workers.outcome import Failed, Interrupted, Outcome, Succeeded
from tests.surroundings.terminal import Terminal

FAILED = Failed(1, 1, 0, "host-0", 99, -9, 3.0, "a password", "")


def worker(rank: int, state: str = "running", told_s: float | None = 100.0, **numbers: float | None) -> WorkerState:
    return WorkerState(rank, 1000 + rank, state, told_s, numbers)


def sight(num_nodes: int = 2, **more: Any) -> Sight:
    nodes = tuple(JobNode(f"agent-{at}", f"host-{at}", 2, at) for at in range(num_nodes))
    states = {
        f"agent-{at}": NodeState(1, tuple(worker(2 * at + one, step=10 + at, loss=2.0 + at) for one in range(2)))
        for at in range(num_nodes)
    }
    return Sight(JobState("job-7", 40.0, 3, "running", 1, 2, nodes, **more), states)


def test_what_was_put_into_the_store_is_seen() -> None:
    store = HashStore()
    assert look(store) is None
    expected = sight()
    known: set[str] = set()
    tell_job(store, expected.job, known)
    assert look(store) == replace(expected, nodes={})
    for agent, state in expected.nodes.items():
        tell_node(store, agent, state)
    tell_job(store, expected.job, known)
    assert look(store) == expected
    assert known == expected.nodes.keys()


@pytest.mark.parametrize("said", ["{half", '{"nodes": [{"name": 1}]}', '{"nodes": []}', "[]"])
def test_what_another_version_says_is_no_traceback(said: str) -> None:
    store = HashStore()
    store.set("job", said)
    with pytest.raises(LaunchError, match="Ask with the job's own version"):
        look(store)


def test_numbers_of_several_ranks_are_combined_by_their_names() -> None:
    reported: list[dict[str, int | float | None]] = [
        {"step": 4, "loss": 1.0, "tokens_per_s": 100, "lr": None},
        {"step": 5, "loss": 2.0, "tokens_per_s": 50},
        {},
    ]
    assert combined(reported) == {"step": (4, 5), "loss": (1.5, 1.5), "tokens_per_s": (150, 150), "lr": None}


def test_a_job_of_several_nodes_is_a_table_of_nodes() -> None:
    seen = sight(awaited="node 1 (host-1) to stop its workers")
    assert table_of(seen, 100.0).lines() == [
        "job job-7: running, round 1, 2 nodes, 4 workers, restart 2 of 3, 1:00",
        "  node  host    workers   step  loss  state",
        "     0  host-0        2     10     2  running",
        "     1  host-1        2     11     3  running",
        "   all                   10-11   2.5",
        "waiting for node 1 (host-1) to stop its workers",
    ]


def test_a_job_of_one_node_is_a_table_of_its_workers() -> None:
    states = (worker(0, step=3, tokens_per_s=1234.5, loss=None), worker(1, "exit code 1", told_s=None))
    seen = replace(sight(1), nodes={"agent-0": NodeState(1, states)})
    assert table_of(seen, 130.0).lines()[1:] == [
        "  rank   pid  step  loss  tokens/s  state",
        "     0  1000     3     ?     1.23k  running, silent for 0:30",
        "     1  1001                        exit code 1",
        "   all           3     ?     1.23k",
    ]


def test_workers_of_an_earlier_round_are_not_shown() -> None:
    seen = replace(sight(1), nodes={"agent-0": NodeState(0, (worker(0, step=900),))})
    assert seen.everyone == []
    assert len(table_of(seen, 100.0).rows) == 0


def test_a_long_table_is_cut_but_not_its_sum() -> None:
    table = table_of(sight(40), 100.0, max_rows=5)
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3", "all"]
    assert table.lines()[-1] == "  and 36 more"


def test_for_programs_all_is_json_that_every_parser_reads() -> None:
    states = (worker(0, loss=float("nan")), worker(1, step=1))
    seen = replace(sight(1), nodes={"agent-0": NodeState(1, states)})
    text = json.dumps(seen.as_json(), allow_nan=False)
    found = json.loads(text)
    assert (found["job"], found["num_restarts"], found["phase"]) == ("job-7", 2, "running")
    assert found["nodes"][0]["host"] == "host-0"
    assert [each["numbers"] for each in found["nodes"][0]["workers"]] == [{"loss": None}, {"step": 1}]


def test_a_drawn_table_is_narrower_than_its_terminal_and_shows_no_control_sequences() -> None:
    pytest.importorskip("rich")
    states = (worker(0, **{"step": 1, "\x1b[31mred": 2.0, **{f"number_{at}": 0.123456 for at in range(9)}}), worker(1))
    seen = replace(sight(1), nodes={"agent-0": NodeState(1, states)})
    for columns in (20, 40, 80):
        terminal = Terminal(columns, 20)
        lines = drawn(table_of(seen, 100.0), columns, is_coloured=True)
        terminal.feed(b"\n".join(lines))
        assert len(terminal.shown()) == len(lines)
    assert terminal.shown()[0].startswith("job job-7: running, round 1, 1 node, 2 workers")
    assert "?[31mred" in terminal.shown()[1]


def record(event: str, **fields: Any) -> Record:
    return {"event": event, **fields}


class Told:
    """A rendezvous of two nodes with a chronicle beside it."""

    def __init__(self, **terms: int) -> None:
        self.machine = Rendezvous(Terms(2, 2, **terms), node(0), 0.0)
        self.chronicle = Chronicle(JobState("job", 0.0, terms.get("max_restarts", 0)), record)

    def __call__(self, event: Event) -> list[Record]:
        return self.chronicle.follow(event, self.machine.handle(event, 1.0))

    def ended(self, rank: int, outcome: Outcome, round: int = 0) -> list[Record]:
        return self(Ended(f"agent-{rank}", round, outcome))


def node(rank: int) -> Node:
    return Node(f"agent-{rank}", rank, "2", 4, "1", "run", "d", f"host-{rank}")


def test_a_restart_is_told_from_its_cause_to_its_round() -> None:
    told = Told(max_restarts=2)
    assert told(Came(node(0))) == [record("node_joined", host="host-0", node_rank=0, workers=4)]
    nodes = [{"group_rank": rank, "host": f"host-{rank}", "first_rank": 4 * rank, "workers": 4} for rank in range(2)]
    joined = record("node_joined", host="host-1", node_rank=1, workers=4)
    assert told(Came(node(1))) == [joined, record("round_formed", round=0, world_size=8, nodes=nodes)]
    assert told(Came(node(1))) == []
    cause = {"kind": "worker failed", "rank": 1, "host": "host-0", "pid": 99, "signal": "SIGKILL"}
    assert told.ended(0, FAILED) == [record("stop", round=0, cause=cause)]
    assert told(Stopped("agent-0", 0)) == []
    assert told(Stopped("agent-1", 0)) == [
        record("restart", restart=1, max_restarts=2),
        record("round_formed", round=1, world_size=8, nodes=nodes),
    ]
    state = told.chronicle.state(Phase.RUNNING, "")
    assert (state.phase, state.round, state.num_restarts) == ("running", 1, 1)
    assert [(each.host, each.num_workers, each.group_rank) for each in state.nodes] == [
        ("host-0", 4, 0),
        ("host-1", 4, 1),
    ]


def test_a_lost_node_leaves_and_the_end_has_a_cause() -> None:
    told = Told()
    told(Came(node(0)))
    told(Came(node(1)))
    (stop, left) = told(NodeLost("agent-1"))
    assert told(Came(node(1))) == []
    assert (left["event"], left["host"], left["group_rank"], left["cause"]["kind"]) == (
        "node_left",
        "host-1",
        1,
        "lost",
    )
    assert stop["cause"]["reason"] == "node 1 (host-1) gave no sign of life for 8 s; the job was stopped."
    (left,) = told(Stopped("agent-0", 0))
    assert (left["event"], left["host"], left["cause"]["kind"]) == ("node_left", "host-0", "lost")


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (Succeeded(), {"kind": "success"}),
        (Interrupted(15, 0, "h"), {"kind": "signal", "signal": "SIGTERM", "host": "h"}),
    ],
)
def test_ends_say_why(outcome: Outcome, cause: Record) -> None:
    told = Told()
    told(Came(node(0)))
    told(Came(node(1)))
    records = (
        told.ended(0, outcome) + told.ended(1, outcome) + told(Stopped("agent-0", 0)) + told(Stopped("agent-1", 0))
    )
    left = [record("node_left", host=f"host-{rank}", group_rank=rank, cause=cause) for rank in range(2)]
    assert sorted(records[-2:], key=lambda one: one["group_rank"]) == left


def test_the_log_is_appended_to_line_by_line_and_has_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "events.jsonl"
    for _ in range(2):
        log = EventLog(file)
        told = Told()
        log.write([*told(Came(node(0))), *told(Came(node(1))), *told.ended(0, FAILED)])
        log.close()
        log.write([happened("late")])
    lines = file.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == 2 * ["node_joined", "node_joined", "round_formed", "stop"]
    assert "password" not in file.read_text()


def test_a_log_that_cannot_be_written_is_named_and_a_full_disk_ends_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot be written: Is a directory\. Name another --event-log"):
        EventLog(tmp_path)
    log = EventLog(Path("/dev/full"))
    log.write([happened("one")])
    log.write([happened("two")])
    log.close()


def test_times_are_utc() -> None:
    assert happened("x")["time"].endswith("Z")
    assert len(happened("x")["time"]) == len("2026-01-01T00:00:00.000000Z")


def test_only_notes_of_this_user_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, endpoint in (("disttrain-a", "host:1"), ("disttrain-b", "host:2"), ("disttrain-c", "host:1")):
        (tmp_path / name).mkdir()
        leave_note(tmp_path / name, Address(endpoint, f"{name}/token"))
    (tmp_path / "disttrain-d").mkdir()
    (tmp_path / "disttrain-d" / "job.json").write_text("{half")
    assert (tmp_path / "disttrain-a" / "job.json").stat().st_mode & 0o777 == 0o600
    assert addresses_here() == [
        Address("host:1", "disttrain-a/token"),
        Address("host:2", "disttrain-b/token"),
        # One of the two was killed, and the other has its port.
        Address("host:1", "disttrain-c/token"),
    ]
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert addresses_here() == []
