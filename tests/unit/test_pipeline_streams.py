"""Which stage waits for what of another, where each has a stream of its own. Streams and events are played."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from disttrain.pipelining.runtime.streams import Streams, are_apart

CUDA = torch.device("cuda", 0)


class Stream:
    """Counts what it has been given, and notes what it waits for."""

    def __init__(self, _device: torch.device | None = None) -> None:
        self.num_given = 0
        self.waits: list[tuple[Stream, int]] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((other, other.num_given))

    def wait_event(self, event: Event) -> None:
        assert event.place is not None
        self.waits.append(event.place)


class Event:
    """Where a stream was."""

    def __init__(self) -> None:
        self.place: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.place = stream, stream.num_given


class Read:
    """A tensor that notes who reads it."""

    def __init__(self) -> None:
        self.readers: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.readers.append(stream)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """All streams, in the order in which they were made; the first is the current one."""
    streams = [Stream()]

    def make(device: torch.device) -> Stream:
        streams.append(Stream(device))
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: streams[0])
    return streams


def test_a_stage_waits_for_what_it_is_given_and_not_for_what_runs_beside_it(made: list[Stream]) -> None:
    streams = Streams(CUDA)
    streams.begin([1, 2])
    _, first, second = made
    second.num_given = 5
    mark = streams.mark(2)
    # Another forward of stage 2, beside which the backward of stage 1 is to run.
    second.num_given = 9
    tensors = [Read(), Read()]
    given: Sequence[object] = tensors
    first.waits.clear()
    streams.follow(1, mark, given)  # type: ignore[arg-type]
    assert first.waits == [(second, 5)]
    assert [tensor.readers for tensor in tensors] == [[first], [first]]


def test_stages_on_one_stream_wait_for_nothing(made: list[Stream]) -> None:
    streams = Streams(CUDA)
    assert streams.mark(1) is None
    streams.follow(2, None, [])
    assert len(made) == 1


def test_stages_that_share_a_weight_are_not_apart() -> None:
    first, last = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    assert are_apart([first, last])
    last[0].weight = first[0].weight
    assert are_apart([last, nn.Linear(4, 4)])
    assert not are_apart([first, last])
