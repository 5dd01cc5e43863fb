"""Data that can only be read on: streams whose rows do not depend on how many replicas read them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain.checkpoint import load, save
from disttrain.data import Prefetcher, StreamLoader
from disttrain.errors import DataError
from disttrain.testing import run_threads

NUM_SAMPLES = 26


class Streaming:
    """The protocol of Hugging Face's IterableDataset, as far as it is used: a state, and epochs.

    As there, a state that was loaded counts for the epoch that it is of.
    """

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples
        self.epoch = self.at = 0
        self._loaded: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.at = self._loaded["at"] if self._loaded is not None and self._loaded["epoch"] == self.epoch else 0
        while self.at < len(self.samples):
            self.at += 1
            yield 100 * self.epoch + self.samples[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        nested = {"type": "Examples", "list": [1, 2], "nothing": None}
        started = {f"of epoch {self.epoch}": True} if self.at else {}
        return {"epoch": self.epoch, "at": self.at, "nested": nested, **started}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["nested"] == {"type": "Examples", "list": [1, 2], "nothing": None}
        self._loaded = dict(state_dict)


class Rewinding(Streaming):
    """A stream with a state, but no epochs: it begins again where it is told to."""

    set_epoch = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "set_epoch":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __iter__(self) -> Iterator[int]:
        self.at = self._loaded["at"] if self._loaded is not None else 0
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]


def streams(kind: Any, num_streams: int) -> list[Any]:
    return [kind(list(range(number, NUM_SAMPLES, num_streams))) for number in range(num_streams)]


def trained(kind: Any, folder: Path, num_steps: int, *, is_resumed: bool, num_streams: int = 4) -> list[list[int]]:
    """This rank's rows in each step; the state is saved at the end."""
    with Prefetcher(StreamLoader(streams(kind, num_streams), 12)) as batches:
        if is_resumed:
            load({"data": batches}, folder / "save")
        rows = [next(batches).tolist() for _ in range(num_steps)]
        save({"data": batches}, folder / "save", overwrite=is_resumed)
    return rows


def steps_of(parts: list[list[list[int]]]) -> list[list[int]]:
    """All replicas' rows of each step."""
    return [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", [Streaming, Rewinding, list])
@pytest.mark.parametrize("worlds", [(2, 4, 1), (3, 2, 6), (1, 3, 12)])
def test_another_number_of_replicas_goes_on_with_the_same_rows(tmp_path: Path, kind: Any, worlds: tuple[int]) -> None:
    undisturbed = StreamLoader(streams(kind, 4), 12, replica=0, num_replicas=1)
    expected = [rows.tolist() for rows in itertools.islice(undisturbed, 9)]
    found = []
    for number, num_ranks in enumerate(worlds):
        arguments: dict[str, Any] = {"is_resumed": number > 0}
        parts = run_threads(num_ranks, lambda own=arguments: trained(kind, tmp_path, 3, **own))
        found += steps_of(parts)
    assert found == expected
    counts = Counter(number % 100 for rows in found for number in rows)
    assert set(counts) == set(range(NUM_SAMPLES))
    # Streams of seven samples and of six begin their epochs by themselves.
    assert set(counts.values()) <= {3, 4, 5}


def test_streams_are_told_of_their_epochs() -> None:
    loader = StreamLoader(streams(Streaming, 2), 4, replica=0, num_replicas=1, collate=list)
    rows = list(itertools.islice(loader, 14))
    assert rows[6] == [24, 100, 25, 101]
    assert rows[13] == [200 + number for number in (2, 4, 3, 5)] or rows[13][0] >= 200


def test_ranks_read_their_own_streams_alone() -> None:
    def body() -> list[str]:
        return sorted(StreamLoader(streams(Streaming, 4), 12).state_dict()["streams"])

    assert run_threads(2, body) == [["0", "1"], ["2", "3"]]
    assert run_threads(3, body) == [["0", "1"], ["1", "2"], ["2", "3"]]


def test_what_cannot_go_on_is_refused() -> None:
    with pytest.raises(DataError, match="a batch of 10 cannot have as many rows of each of 4 streams"):
        StreamLoader(streams(list, 4), 10)
    with pytest.raises(DataError, match=r"stream 1 has no samples\. Make fewer streams"):
        next(iter(StreamLoader([[1], []], 2, replica=0, num_replicas=1)))
    first = StreamLoader(streams(list, 4), 12, replica=0, num_replicas=2)
    second = StreamLoader(streams(list, 4), 12, replica=1, num_replicas=2)
    with pytest.raises(DataError, match=r"there is no state of stream 2; there are those of 0, 1\. Save the loader on"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="saved with batch_size=12; now it is batch_size=24"):
        StreamLoader(streams(list, 4), 24, replica=0, num_replicas=2).load_state_dict(first.state_dict())


def test_hugging_faces_streaming_sets(tmp_path: Path) -> None:
    """A set of four files, as `load_dataset(..., streaming=True)` reads them."""
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    files = []
    for number in range(4):
        files.append(str(tmp_path / f"{number}.jsonl"))
        lines = [f'{{"number": {sample}}}' for sample in range(number, NUM_SAMPLES, 4)]
        Path(files[-1]).write_text("\n".join(lines) + "\n")
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))

    def parts() -> list[Any]:
        return [split_dataset_by_node(data, rank, 4) for rank in range(4)]

    def body(folder: Path, *, is_resumed: bool) -> list[list[int]]:
        loader = StreamLoader(parts(), 12, collate=lambda samples: torch.tensor([each["number"] for each in samples]))
        batches = iter(loader)
        if is_resumed:
            load({"data": loader}, folder / "save")
        rows = [next(batches).tolist() for _ in range(4)]
        save({"data": loader}, folder / "save", overwrite=is_resumed)
        return rows

    (whole,) = run_threads(1, lambda: body(tmp_path / "one", is_resumed=False))
    (rest,) = run_threads(1, lambda: body(tmp_path / "one", is_resumed=True))
    found = steps_of(run_threads(2, lambda: body(tmp_path / "two", is_resumed=False)))
    found += steps_of(run_threads(4, lambda: body(tmp_path / "two", is_resumed=True)))
    assert found == whole + rest
    assert set(itertools.chain(*whole)) == set(range(NUM_SAMPLES))
