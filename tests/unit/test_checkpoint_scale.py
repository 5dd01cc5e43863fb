"""Saves of many ranks, without any: what a rank plans, reads and opens does not grow with the others.

Counted at two sizes each, as times are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint import LocalStorage, PerRank, load_full, save
from disttrain.checkpoint.format import parts
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.image import Written
from disttrain.checkpoint.format.layout import Layout, index_of, rank_at, runs_of
from disttrain.checkpoint.format.manifest import MANIFEST, TABLES, Chunk, Manifest, SavedFile, SavedTensor, file_name
from disttrain.checkpoint.format.reading import read_manifest
from disttrain.checkpoint.format.rules import of_all_chunks
from disttrain.checkpoint.format.verifying import find_damage
from disttrain.checkpoint.layout import TensorSpec
from disttrain.checkpoint.loading.sharing import shared_boxes
from disttrain.checkpoint.outline import Outline
from disttrain.checkpoint.plan import plan_load, plan_save
from disttrain.checkpoint.saving.commit import Contents, files_about
from disttrain.checkpoint.storage.base import ReadableFile
from disttrain.errors import CheckpointCorruptError
from tests.unit.test_checkpoint_plan import SHAPES, boxes_in, shardings

NUM_TENSORS = 18


class CountingStorage(LocalStorage):
    """Counts the openings and the bytes read of each file."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.num_bytes: dict[str, int] = {}

    def open_file(self, path: Path) -> AbstractContextManager[ReadableFile]:
        self.opened.append(path.name)
        return self._counted(path)

    @contextmanager
    def _counted(self, path: Path) -> Iterator[ReadableFile]:
        with super().open_file(path) as file:
            yield _Counted(file, path.name, self.num_bytes)


class _Counted:
    def __init__(self, file: ReadableFile, name: str, read_bytes: dict[str, int]) -> None:
        self._file, self._name, self._read_bytes = file, name, read_bytes
        self.num_bytes = file.num_bytes

    def read_at(self, offset: int, buffer: memoryview) -> int:
        self._read_bytes[self._name] = self._read_bytes.get(self._name, 0) + len(buffer)
        return self._file.read_at(offset, buffer)


def sharded(num_ranks: int, num_replicas: int) -> Outline:
    """Rows of different lengths, cut among all or among groups of ranks that have the same; and counters."""
    mesh = (num_replicas, num_ranks // num_replicas)
    tensors = {
        f"w{number}": TensorSpec((2 * num_ranks + number, 4), "float32", range(num_ranks), mesh, (None, 0))
        for number in range(NUM_TENSORS)
    }
    return Outline(tensors | {"step": TensorSpec((), "int64"), "bias": TensorSpec((8,), "float32")}, ["value"], ["rng"])


def write_about(folder: Path, outlines: list[Outline]) -> None:
    """All of a save but its data files, as rank 0 makes it from what all ranks have told it."""
    plans = plan_save(outlines)
    rows = []
    for rank, plan in enumerate(plans):
        written, offset = Written(), 64
        for name, box in plan.parts:
            num_bytes = box.num_elements * (8 if name == "step" else 4)
            chunk = Chunk(file_name(rank), offset, num_bytes, box, bytes(8))
            (written.parts if name in plan.listed else written.rows).append((name, chunk))
            offset += num_bytes
        for name in plan.values:
            chunk = Chunk(file_name(rank), offset, 5, Box((0,), (5,)), bytes(8))
            (written.rows if name == "rng" else written.values).append((name, chunk))
            offset += 5
        rows.append(replace(written, file=SavedFile(offset, 64, bytes(8))).to_plain())
    unique = {id(outline): outline for outline in outlines}.values()
    tensors = {name: (spec.shape, spec.dtype) for outline in unique for name, spec in outline.tensors.items()}
    contents = Contents("a test", tensors, plans.owners(), {}, plans.spreads())
    for name, data in files_about("0" * 32, contents, rows).items():
        (folder / name).write_bytes(b"".join(data))


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_a_rank_plans_its_own_part(monkeypatch: pytest.MonkeyPatch, num_replicas: int) -> None:
    """Cuts are computed as often on a few ranks as on many, and no mesh is listed."""
    num_cuts = 0
    real = parts._cut

    def counted(*args: Any) -> Any:
        nonlocal num_cuts
        num_cuts += 1
        return real(*args)

    monkeypatch.setattr(parts, "_cut", counted)
    counts = []
    for num_ranks in (16, 1024):
        outlines = [sharded(num_ranks, num_replicas)] * num_ranks
        num_cuts = 0
        plan = plan_save(outlines)[num_ranks // 2]
        assert len(plan.parts) <= NUM_TENSORS + 2
        shared_boxes([outline.tensors for outline in outlines], num_ranks // 2)
        counts.append(num_cuts)
    assert counts[0] == counts[1] <= 3 * NUM_TENSORS


def test_a_rank_reads_the_tables_that_it_needs(tmp_path: Path) -> None:
    """One table for the part that it has saved, two or three on another world; the manifest has no chunk of others."""
    sizes, openings = [], []
    for num_ranks in (16, 256):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        outlines = [sharded(num_ranks, 1)] * num_ranks
        write_about(folder, outlines)
        storage = CountingStorage()
        manifest = read_manifest(storage, folder)
        plan = plan_save(outlines)[5]
        plan_load(manifest, {name: [box] for name, box in plan.parts})
        assert manifest.per_rank["rng"][5].file == file_name(5)
        # A reader of half as many ranks.
        halves = Layout((runs_of(range(num_ranks // 2)),), (num_ranks // 2,), ((0, 1),))
        wanted = {
            name: halves.boxes_at(spec.shape, (3,)) for name, spec in outlines[0].tensors.items() if spec.mesh_shape
        }
        plan_load(manifest, wanted)
        openings.append(len(storage.opened))
        sizes.append(storage.num_bytes[TABLES] / len(outlines[0].tensors))
        assert (folder / MANIFEST).stat().st_size < 400 * NUM_TENSORS + 200 * num_ranks
    assert openings[0] == openings[1] <= 4
    assert sizes[1] < 1.2 * sizes[0]


def test_bytes_of_a_manifest_are_few_for_a_chunk(tmp_path: Path) -> None:
    """Beside the eight of its checksum; more ranks don't need more for each."""
    per_chunk = []
    for num_ranks in (16, 256):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        write_about(folder, [sharded(num_ranks, 1)] * num_ranks)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        per_chunk.append(num_bytes / (NUM_TENSORS * num_ranks))
    assert per_chunk[1] < per_chunk[0] < 40


@st.composite
def saved_worlds(draw: st.DrawFn) -> tuple[list[Outline], dict[str, TensorSpec]]:
    world_size = draw(st.integers(1, 6))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    tensors = {
        f"t{place}": replace(draw(shardings(shape, world_size)), dtype="float32") for place, shape in enumerate(shapes)
    }
    return [Outline(tensors, ["value"], ["rng"])] * world_size, tensors


@settings(max_examples=60, deadline=None)
@given(saved_worlds(), st.data())
def test_chunks_in_tables_are_found(
    tmp_path_factory: pytest.TempPathFactory, world: tuple[list[Outline], dict[str, TensorSpec]], data: st.DataObject
) -> None:
    outlines, tensors = world
    folder = tmp_path_factory.mktemp("save")
    write_about(folder, outlines)
    manifest = read_manifest(LocalStorage(), folder)
    for name, spec in tensors.items():
        tensor = manifest.tensors[name]
        assert list(of_all_chunks(name, tensor)) == []
        if 0 in spec.shape:
            assert tensor.chunks == ()
            continue
        box = data.draw(boxes_in(spec.shape))
        times = np.zeros(spec.shape, int)
        for read in plan_load(manifest, {name: [box]}):
            times[read.box.slices()] += 1
        assert (times[box.slices()] == 1).all()
        assert times.sum() == box.num_elements
    assert [*manifest.per_rank["rng"]] == [*range(len(outlines))]


def test_replicas_on_meshes_beside_each_other_are_found(tmp_path: Path) -> None:
    columns = [TensorSpec((5, 2), "float32", ranks, (2,), (0,)) for ranks in ((0, 2), (1, 3))]
    write_about(tmp_path, [Outline({"a": columns[rank % 2], "b": columns[rank % 2]}) for rank in range(4)])
    manifest = read_manifest(LocalStorage(), tmp_path)
    assert {chunk.file for chunk in manifest.tensors["a"].chunks} == {file_name(0), file_name(2)}
    assert {chunk.file for chunk in manifest.tensors["b"].chunks} == {file_name(1), file_name(3)}
    for name in ("a", "b"):
        (read,) = plan_load(manifest, {name: [Box((4, 0), (1, 2))]})
        assert read.chunk.box == Box((3, 0), (2, 2))


@given(st.lists(st.integers(0, 40), unique=True, max_size=12))
def test_ranks_are_few_ranges(ranks: list[int]) -> None:
    runs = runs_of(ranks)
    assert [*itertools.chain.from_iterable(runs)] == ranks
    assert [rank_at(runs, index) for index in range(len(ranks))] == ranks
    assert [index_of(runs, rank) for rank in ranks] == [*range(len(ranks))]
    assert index_of(runs, 41) is None
    assert len(runs_of(sorted(range(0, 40, 4)))) == 1


def test_chunks_in_tables_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """As many elements as there should be, under right checksums."""
    write_about(tmp_path, [Outline({"w": TensorSpec((4, 2), "float32", (0, 1), (2,), (0,))})] * 2)
    manifest = read_manifest(LocalStorage(), tmp_path)
    assert manifest.tables is not None
    (chunk,) = manifest.tables.of(file_name(1))["w"]
    object.__setattr__(chunk, "box", Box((0, 0), (2, 2)))
    with pytest.raises(CheckpointCorruptError, match="'w' has chunks that lie over each other"):
        plan_load(manifest, {"w": [Box.whole((4, 2))]})


def save_of_two_forms(folder: Path) -> Path:
    """Of one process, whose value per rank is in a table."""
    save({"w": torch.arange(6.0), "own": PerRank([1, 2])}, folder)
    return folder


def test_a_damaged_table_is_found_and_named(tmp_path: Path) -> None:
    folder = save_of_two_forms(tmp_path / "save")
    whole = (folder / TABLES).read_bytes()
    sentence = r"manifest\.tables does not have the table of rank-00000\.safetensors that was saved"
    for number in range(len(whole)):
        (folder / TABLES).write_bytes(whole[:number] + bytes([whole[number] ^ 4]) + whole[number + 1 :])
        with pytest.raises(CheckpointCorruptError, match=sentence):
            load_full(folder)
    storage = LocalStorage()
    assert len(find_damage(storage, folder, read_manifest(storage, folder))) == 1
    (folder / TABLES).write_bytes(whole[:-1])
    with pytest.raises(CheckpointCorruptError, match="lacks the table of rank-00000"):
        load_full(folder)
    (folder / TABLES).unlink()
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.tables is missing"):
        load_full(folder)
    (folder / TABLES).write_bytes(whole)
    assert find_damage(storage, folder, read_manifest(storage, folder)) == []


@pytest.mark.parametrize("num_tensors", [20, 400])
def test_verifying_opens_each_file_once(tmp_path: Path, num_tensors: int) -> None:
    save({f"t{number}": torch.full((4,), number) for number in range(num_tensors)}, tmp_path / "save")
    storage = CountingStorage()
    manifest = read_manifest(storage, tmp_path / "save")
    storage.opened.clear()
    assert find_damage(storage, tmp_path / "save", manifest) == []
    assert storage.opened == [file_name(0)]


@pytest.mark.parametrize("num_chunks", [64, 1024])
def test_chunks_that_are_far_are_not_compared(monkeypatch: pytest.MonkeyPatch, num_chunks: int) -> None:
    """Of a tensor whose chunks are listed, as those of other formats are."""
    chunks = tuple(Chunk("f", 8 * row, 8, Box((row, 0), (1, 2)), b"") for row in range(num_chunks))
    manifest = Manifest("id", 1, "a test", {}, {"w": SavedTensor((num_chunks, 2), "float32", chunks)}, {}, {})
    num_compared = 0
    real = Box.intersection

    def counted(self: Box, other: Box) -> Box | None:
        nonlocal num_compared
        num_compared += 1
        return real(self, other)

    monkeypatch.setattr(Box, "intersection", counted)
    assert len(plan_load(manifest, {"w": [Box((num_chunks // 2, 0), (3, 2))]})) == 3
    assert num_compared <= 5
