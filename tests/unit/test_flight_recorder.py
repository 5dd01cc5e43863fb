"""The recorder: what it keeps of each call, for how long, and that it keeps no tensor."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
import weakref
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch

import disttrain
from disttrain.dtensor import DTensor, Shard
from disttrain.errors import DisttrainError, FlightDumpError
from disttrain.flight_recorder import FlightRecorder, enable, read_dump
from disttrain.flight_recorder.record.process.callers import Callers, walker
from disttrain.flight_recorder.record.record import State
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from disttrain.testing import run_threads

HERE = __file__


def _fake_world(world_size: int = 4) -> World:
    return World(HashStore(), 0, world_size, backend="fake", timeout_s=1.0, device=torch.device("cpu"))


def test_a_call_as_it_is_recorded() -> None:
    recorder = FlightRecorder()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        output, part = torch.empty(8, 3), torch.empty(2, 3)
        here = inspect.currentframe()
        assert here is not None
        at = here.f_lineno + 1
        disttrain.all_gather_into_tensor(output, part)
        disttrain.broadcast(part.to(torch.int32), src=2)
        dump = recorder.snapshot("asked for")
    gather, broadcast = dump.records
    assert (gather.site.operation, gather.sequence, gather.state) == ("all_gather_into_tensor", 1, State.COMPLETED)
    assert (gather.site.group_name, gather.site.ranks, gather.site.peer_rank) == ("world", (0, 1, 2, 3), None)
    assert (gather.site.input_shapes, gather.site.output_shapes) == (((2, 3),), ((8, 3),))
    assert gather.site.tensors == "float32[2, 3] -> [8, 3]"
    assert gather.site.stack[0] == (HERE, at, "test_a_call_as_it_is_recorded")
    assert (broadcast.site.peer_rank, broadcast.site.dtypes) == (2, ("int32",))
    assert gather.completed_s is not None
    assert dump.started_s <= gather.enqueued_s <= gather.completed_s <= broadcast.enqueued_s <= dump.dumped_s
    assert [(group.group_name, group.last_sequence) for group in dump.groups] == [("world", 2)]


def test_no_garbage_is_collected_by_who_dumps(tmp_path: Path) -> None:
    """It may be a GPU's memory, and somebody may hold the allocator's lock for as long as the hang lasts."""
    recorder = FlightRecorder()
    while_dumping: list[bool] = []

    def collecting(phase: str, _: object) -> None:
        while_dumping.append(any(frame.f_code.co_name == "take_snapshot" for frame, _ in traceback.walk_stack(None)))

    threshold = gc.get_threshold()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        assert gc.isenabled()
        gc.callbacks.append(collecting)
        gc.set_threshold(1)
        try:
            recorder.dump(tmp_path)
            gc.collect()
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(collecting)
    assert gc.isenabled()
    assert while_dumping
    assert not any(while_dumping)


def test_the_ring_keeps_the_last_and_knows_how_far_each_group_came() -> None:
    recorder = FlightRecorder(num_records=10)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        group = disttrain.new_group([0, 2])
        disttrain.all_reduce(torch.ones(1), group=group)
        for _ in range(25):
            disttrain.barrier()
        dump = recorder.snapshot("asked for")
    assert [record.sequence for record in dump.records] == list(range(16, 26))
    assert {group.ranks: group.last_sequence for group in dump.groups} == {(0, 2): 1, (0, 1, 2, 3): 25}


def test_messages_are_counted_for_each_peer_and_direction() -> None:
    recorder = FlightRecorder()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        for peer in (1, 3, 1):
            disttrain.send(torch.ones(2), dst=peer)
        disttrain.recv(torch.ones(2), src=1)
        dump = recorder.snapshot("asked for")
    found = [(record.site.operation, record.site.peer_rank, record.sequence) for record in dump.records]
    assert found == [("send", 1, 1), ("send", 3, 1), ("send", 1, 2), ("recv", 1, 1)]
    assert {(channel.operation, channel.peer_rank, channel.last_sequence) for channel in dump.channels} == {
        ("send", 1, 2),
        ("send", 3, 1),
        ("recv", 1, 1),
    }


def test_no_tensor_is_kept_and_what_nobody_waits_for_stays_open() -> None:
    recorder = FlightRecorder(num_records=4)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        tensors = [torch.ones(1) for _ in range(20)]
        works = [disttrain.all_reduce(tensor, async_op=True) for tensor in tensors]
        gone = [weakref.ref(tensor) for tensor in tensors]
        del tensors, works
        dump = recorder.snapshot("asked for")
    assert [record.state for record in dump.records] == [State.ENQUEUED] * 4
    assert [reference() for reference in gone] == [None] * 20


def test_stacks_are_the_innermost_frames_outside_disttrain() -> None:
    recorder = FlightRecorder(num_frames=6)

    def nested(depth: int) -> None:
        if depth:
            nested(depth - 1)
        else:
            disttrain.barrier()

    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        nested(10)
        (record,) = recorder.snapshot("asked for").records
    assert {(frame.file, frame.function.rpartition(".")[2]) for frame in record.site.stack} == {(HERE, "nested")}
    assert 3 <= len(record.site.stack) <= 6


def _calling() -> None:
    disttrain.barrier()


def test_callers_whose_code_has_no_hash() -> None:
    """As that of Dynamo's, among whose constants there may be a dict."""
    code = _calling.__code__.replace(co_consts=(*_calling.__code__.co_consts, {}))
    recorder = FlightRecorder()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        FunctionType(code, globals())()
        dump = recorder.snapshot("asked for")
    assert [record.site.stack[0][2] for record in dump.records] == ["_calling"]


def test_threads_and_an_exception_are_in_the_dump() -> None:
    recorder = FlightRecorder()
    recorder.attach(_fake_world())

    def fail() -> None:
        raise ValueError("bad batch\nsecond line")

    try:
        fail()
    except ValueError as error:
        dump = recorder.snapshot("uncaught exception", error)
    assert dump.failure is not None
    assert (dump.failure.kind, dump.failure.message) == ("ValueError", "bad batch")
    assert dump.failure.stack[0].function.endswith("fail")
    assert dump.threads[0].is_main
    assert any(frame.file == HERE for frame in dump.main_stack)


def test_a_rank_that_fails_in_a_collective(tmp_path: Path) -> None:
    """Rank 1 takes another branch: the threads backend reports it, and both records are there."""

    def work() -> list[str]:
        recorder = enable()
        assert enable() is recorder
        disttrain.all_reduce(torch.ones(2))
        try:
            disttrain.barrier() if disttrain.get_rank() else disttrain.all_reduce(torch.ones(2))
        except DisttrainError:
            file = recorder.dump(tmp_path)
            return [f"{record.site.operation} {record.state}" for record in read_dump(file).records]
        return []

    assert run_threads(2, work) == [
        ["all_reduce completed", "all_reduce failed"],
        ["all_reduce completed", "barrier failed"],
    ]
    assert len({file.name.split(".")[1] for file in tmp_path.iterdir()}) == 1


def test_a_recorder_without_a_world_has_nothing_to_dump(tmp_path: Path) -> None:
    with pytest.raises(FlightDumpError, match=r"Call attach\(world\) first"):
        FlightRecorder().dump(tmp_path)


def test_a_detached_recorder_records_no_more() -> None:
    recorder = FlightRecorder()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        disttrain.barrier()
        recorder.detach()
        disttrain.barrier()
    assert len(recorder.snapshot("asked for").records) == 1


@pytest.mark.parametrize("num_frames", [0, 1, 7, 8, 9, 24])
@pytest.mark.parametrize("depth", [0, 3, 30])
def test_callers_are_those_of_the_stack(num_frames: int, depth: int) -> None:
    """However many are asked for, and there are: innermost first, each at the instruction that it is at."""

    def below(depth: int) -> tuple[Callers, list[tuple[CodeType, int]]]:
        if depth:
            return below(depth - 1)
        here = sys._getframe()
        found = walker(num_frames)(here)
        return found, [(frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_stack(here)][:num_frames]

    (codes, offsets), expected = below(depth)
    # This frame itself has gone on since.
    assert [*zip(codes, offsets, strict=True)][1:] == expected[1:]
    assert codes[:1] == [code for code, _ in expected[:1]]


def test_calls_are_told_apart_by_all_that_they_ask_for() -> None:
    recorder = FlightRecorder()
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        group = disttrain.new_group([0, 1, 2, 3])
        part, whole = torch.ones(2), torch.ones(8)
        lists = [[torch.ones(2) for _ in range(4)], [torch.ones(size) for size in (2, 1, 1, 1)]]
        for _ in range(2):
            # One line each, so that only what is asked for differs.
            for tensor in (part, whole, part.long(), torch.ones(1, 2)):
                disttrain.all_reduce(tensor)
            for of in (None, group):
                disttrain.barrier(of)
            for output in (whole, whole.view(4, 2)):
                disttrain.all_gather_into_tensor(output, part)
            for outputs in lists:
                disttrain.all_gather(outputs, part)
            for message in (disttrain.isend, disttrain.irecv):
                message(part, 1).wait()
        records = recorder.snapshot("asked for").records
    found = [(record.site.operation, record.site.group_name, record.site.tensors) for record in records]
    name = group.group_name
    assert found == 2 * [
        ("all_reduce", "world", "float32[2]"),
        ("all_reduce", "world", "float32[8]"),
        ("all_reduce", "world", "int64[2]"),
        ("all_reduce", "world", "float32[1, 2]"),
        ("barrier", "world", ""),
        ("barrier", name, ""),
        ("all_gather_into_tensor", "world", "float32[2] -> [8]"),
        ("all_gather_into_tensor", "world", "float32[2] -> [4, 2]"),
        ("all_gather", "world", "float32[2] -> [2], [2], [2], [2]"),
        ("all_gather", "world", "float32[2] -> [2], [1], [1], [1]"),
        ("send", "world", "float32[2]"),
        ("recv", "world", "float32[2]"),
    ]
    assert [record.sequence for record in records if record.site.is_message] == [1, 1, 2, 2]


def test_calls_of_disttrains_own_have_the_line_of_who_asked() -> None:
    """Also where the same line within disttrain was last called for another one of the user's, however far out."""
    recorder = FlightRecorder()

    def below(depth: int) -> None:
        if depth:
            below(depth - 1)
        else:
            tensor.full_tensor()

    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        mesh = disttrain.init_device_mesh("cpu", (4,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        for _ in range(3):
            for depth in (0, 5, 6, 5):
                below(depth)
            below(0)
        records = recorder.snapshot("asked for").records
    stacks = [[frame.line for frame in record.site.stack if frame.file == __file__] for record in records]
    assert [len(stack) for stack in stacks] == [2, 7, 8, 7, 2] * 3
    assert stacks[0][1] != stacks[4][1]
    assert stacks[5:] == [*stacks[:5], *stacks[:5]]
    assert len({record.site for record in records}) == 4


def test_a_batch_of_messages_has_the_stack_of_who_calls_it() -> None:
    recorder = FlightRecorder(num_frames=2)
    with entered_world(_fake_world()) as world:
        recorder.attach(world)
        messages = [
            disttrain.P2POp(disttrain.isend, torch.ones(2), 1),
            disttrain.P2POp(disttrain.irecv, torch.ones(3), 2),
        ]
        here = inspect.currentframe()
        assert here is not None
        at = here.f_lineno + 1
        for work in disttrain.batch_isend_irecv(messages):
            work.wait()
        sent, received = recorder.snapshot("asked for").records
    assert (sent.site.operation, sent.site.peer_rank, sent.site.tensors) == ("send", 1, "float32[2]")
    assert (received.site.operation, received.site.peer_rank, received.site.tensors) == ("recv", 2, "float32[3]")
    for record in (sent, received):
        assert record.site.stack[0] == (HERE, at, "test_a_batch_of_messages_has_the_stack_of_who_calls_it")
