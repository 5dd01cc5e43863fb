"""Dumps of torch's own flight recorder: golden files, files that would run code, what torch's fields mean to us."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain._python.pickles import parse_plain
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.analysis.analysis import analyze
from disttrain.flight_recorder.analysis.verdict import Cause, Kind
from disttrain.flight_recorder.dumps.torch_dump import read_torch_dump
from disttrain.flight_recorder.record.record import State

FILES = Path(__file__).parent / "flight_files" / "torch"
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=20,
)


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


@given(plain, st.integers(2, 5))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert parse_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_would_run_code_is_refused(protocol: int, tmp_path: Path) -> None:
    content = {"version": "2.10", "pg_config": {}, "entries": [Evil(tmp_path / "made")]}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(FlightDumpError, match=r"nccl_trace_rank_0 holds more than plain values \(instruction 0x"):
        read_torch_dump(tmp_path / "nccl_trace_rank_0")
    analysis = analyze(tmp_path)
    assert analysis.verdicts[0].kind is Kind.NOT_ENOUGH_DATA
    assert "holds more than plain values" in analysis.notes[0]
    assert not (tmp_path / "made").exists()


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    try:
        parse_plain(data)
    except ValueError:
        return


def test_a_damaged_pickle_is_told(tmp_path: Path) -> None:
    whole = (FILES / "nccl_trace_rank_0").read_bytes()
    file = tmp_path / "nccl_trace_rank_0"
    for end in range(1, len(whole), 37):
        file.write_bytes(whole[:end])
        with pytest.raises(FlightDumpError, match="nccl_trace_rank_0 is damaged"):
            read_torch_dump(file)


@pytest.mark.parametrize("suffix", ["", ".json"])
def test_torch_s_own_files(suffix: str, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copy(FILES / f"nccl_trace_rank_{rank}{suffix}", tmp_path)
    analysis = analyze(tmp_path)
    verdict = analysis.verdicts[0]
    assert (verdict.kind, verdict.ranks, verdict.cause) == (Kind.RANK_ABSENT, (1,), Cause.UNKNOWN)
    where = "make.py:24 in run" if not suffix else "an unknown place"
    assert "Rank 1 did not come to all_reduce #3 of group world (Float[4]), where rank 0 waited" in verdict.summary
    assert where in verdict.summary
    first, second = analysis.dumps
    assert [record.state for record in first.records] == [State.COMPLETED, State.COMPLETED, State.ENQUEUED]
    assert [record.sequence for record in second.records] == [1, 2]


def _entry(number: int, operation: str = "nccl:all_reduce", state: str = "completed", **more: object) -> dict[str, Any]:
    created_ns = 1_700_000_000_000_000_000 + number * 1_000_000_000
    times = {"time_created_ns": created_ns}
    if state != "scheduled":
        times["time_discovered_started_ns"] = created_ns + 1000
    if state == "completed":
        times["time_discovered_completed_ns"] = created_ns + 2000
    return {
        "record_id": number,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "profiling_name": operation,
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": state,
        "is_p2p": False,
        "frames": [{"filename": "/job/train.py", "line": 10 + number, "name": "step"}],
        **times,
        **more,
    }


def _write(folder: Path, rank: int, *entries: dict[str, Any], groups: dict[str, str] | None = None) -> None:
    groups = groups or {"0": "[0, 1]"}
    config = {
        name: {"name": name, "desc": "default_pg" if name == "0" else "mesh_dp", "ranks": ranks}
        for name, ranks in groups.items()
    }
    content = {"version": "2.10", "pg_config": config, "entries": list(entries)}
    (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(content))


def _found(folder: Path) -> tuple[Kind, tuple[int, ...]]:
    verdict = analyze(folder).verdicts[0]
    return verdict.kind, verdict.ranks


def test_a_collective_that_has_not_begun_on_one_gpu(tmp_path: Path) -> None:
    _write(tmp_path, 0, _entry(0), _entry(1, state="started"))
    _write(tmp_path, 1, _entry(0), _entry(1, state="scheduled"))
    assert _found(tmp_path) == (Kind.NEVER_STARTED, (1,))


def test_a_collective_that_has_begun_everywhere(tmp_path: Path) -> None:
    for rank in range(2):
        _write(tmp_path, rank, _entry(0), _entry(1, state="started"))
    assert _found(tmp_path) == (Kind.NETWORK, (0, 1))


def test_another_operation_under_torch_s_name(tmp_path: Path) -> None:
    _write(tmp_path, 0, _entry(0), _entry(1, "nccl:_all_gather_base", "started"))
    _write(tmp_path, 1, _entry(0), _entry(1, "nccl:all_reduce", "started"))
    verdict = analyze(tmp_path).verdicts[0]
    assert verdict.kind is Kind.MISMATCHED_OPERATION
    assert "all_gather_into_tensor" in verdict.summary


def test_messages_are_numbered_by_their_ends(tmp_path: Path) -> None:
    _write(tmp_path, 0, _entry(0), _entry(1, "nccl:send 0->1", "started", is_p2p=True))
    _write(tmp_path, 1, _entry(0), _entry(1, "nccl:all_reduce", "started"))
    assert _found(tmp_path) == (Kind.MISSING_RECEIVE, (1,))


def test_messages_of_a_ring_that_has_lost_some_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path, 0, _entry(5), _entry(6, "nccl:send 0->1", "started", is_p2p=True))
    _write(tmp_path, 1, _entry(5))
    analysis = analyze(tmp_path)
    assert analysis.verdicts[0].kind is Kind.NOTHING_WRONG
    assert analysis.notes == ("torch's dump of rank 0 has lost its first records: its messages are left out",)


def test_messages_issued_together_have_the_state_of_their_batch(tmp_path: Path) -> None:
    for rank in range(2):
        ends = [
            _entry(1, f"nccl:send {rank}->{1 - rank}", "scheduled", is_p2p=True, p2p_seq_id=1),
            _entry(2, f"nccl:recv {rank}<-{1 - rank}", "scheduled", is_p2p=True, p2p_seq_id=1, collective_seq_id=2),
            _entry(3, "nccl:coalesced", "completed", p2p_seq_id=1, collective_seq_id=2),
        ]
        _write(tmp_path, rank, _entry(0), *ends)
    analysis = analyze(tmp_path)
    assert analysis.verdicts[0].kind is Kind.NOTHING_WRONG
    assert all(record.state is State.COMPLETED for dump in analysis.dumps for record in dump.records)


def test_ranks_that_know_other_members(tmp_path: Path) -> None:
    _write(tmp_path, 0, _entry(0), groups={"0": "[0, 1, 2]", "7": "[0, 1]"})
    _write(tmp_path, 1, _entry(0), groups={"0": "[0, 1, 2]", "7": "[0, 1]"})
    _write(tmp_path, 2, _entry(0), groups={"0": "[0, 1, 2]", "7": "[1, 2]"})
    assert _found(tmp_path) == (Kind.DIFFERENT_GROUPS, (2,))


def test_one_name_for_groups_that_have_no_rank_in_common(tmp_path: Path) -> None:
    for rank in range(4):
        ours = "[0, 1]" if rank < 2 else "[2, 3]"
        state = "started" if rank == 2 else "completed"
        entries = [_entry(1, state=state, process_group=["7", "mesh_dp"])] if rank != 3 else []
        _write(tmp_path, rank, _entry(0), *entries, groups={"0": "[0, 1, 2, 3]", "7": ours})
    verdict = analyze(tmp_path).verdicts[0]
    assert (verdict.kind, verdict.ranks) == (Kind.RANK_ABSENT, (3,))
    assert "7:mesh_dp of ranks 2, 3" in verdict.summary


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"version": "2.1"}', "is not a dump of torch's flight recorder"),
        ("[1]", "is damaged"),
        ("\x80\x02]q\x00.", "is not a dump of torch's flight recorder"),
        ('{"version": "9.0", "pg_config": {}}', "has torch's format version 9.0; known is 2"),
        ("{", "is damaged"),
        ("{" * 100_000, "is damaged"),
    ],
)
def test_other_files_are_told(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(content.encode("latin-1"))
    with pytest.raises(FlightDumpError, match=problem):
        read_torch_dump(tmp_path / "nccl_trace_rank_0")


@given(st.data())
def test_fields_of_other_types_are_told(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("dumps")
    entry = _entry(0)
    entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(plain.filter(lambda value: value != value or True))
    try:
        _write(folder, 0, entry)
    except TypeError:
        return
    analysis = analyze(folder)
    assert analysis.verdicts
