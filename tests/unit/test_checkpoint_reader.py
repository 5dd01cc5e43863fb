"""The reader: any box of any chunk, through small blocks and buffers, and no block more than needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint import LocalStorage
from disttrain.checkpoint.format import image
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import Manifest, SavedTensor, file_name
from disttrain.checkpoint.loading import fetches, reader
from disttrain.checkpoint.plan import plan_load
from disttrain.checkpoint.saving import writer
from disttrain.checkpoint.storage.base import ReadableFile

BLOCK_BYTES = 16
FOLDER = Path("/nowhere")


class MemoryFile:
    def __init__(self, data: bytes, reads: list[tuple[int, int]]) -> None:
        self.data = data
        self.num_bytes = len(data)
        self.reads = reads

    def read_at(self, offset: int, buffer: memoryview) -> int:
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.data[offset : offset + len(buffer)]
        return len(buffer)


class MemoryStorage(LocalStorage):
    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}
        self.reads: list[tuple[int, int]] = []

    def write_file(self, path: Path, parts: Iterable[memoryview]) -> None:
        self.files[path] = b"".join(bytes(part) for part in parts)

    @contextmanager
    def open_file(self, path: Path) -> Iterator[ReadableFile]:
        yield MemoryFile(self.files[path], self.reads)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "BLOCK_BYTES", BLOCK_BYTES)
        patch.setattr(fetches, "_GAP_BYTES", 0)
        patch.setattr(reader, "plan_fetches", partial(fetches.plan_fetches, max_bytes=3 * BLOCK_BYTES))
        yield


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.sampled_from([torch.uint8, torch.float64]), st.data())
def test_any_box_is_read(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.arange(np.prod(shape, dtype=int)).to(dtype).view(shape)
    box = data.draw(boxes_in(shape))
    storage, manifest = saved({"w": values})
    target = torch.zeros(box.shape, dtype=dtype)
    reads = plan_load(manifest, {"w": [box]})
    reader.Reader(storage, FOLDER, manifest).read_tensors(reads, {"w": {box: target}})
    assert target.equal(values[box.slices()])


def test_blocks_between_far_rows_are_not_read() -> None:
    """Rows of 4 blocks, of which the third column's are wanted."""
    values = torch.arange(6 * 64, dtype=torch.uint8).view(6, 64)
    storage, manifest = saved({"w": values})
    storage.reads.clear()
    box = Box((1, 33), (4, 10))
    target = torch.zeros(4, 10, dtype=torch.uint8)
    reader.Reader(storage, FOLDER, manifest).read_tensors(plan_load(manifest, {"w": [box]}), {"w": {box: target}})
    assert target.equal(values[1:5, 33:43])
    begin = manifest.tensors["w"].chunks[0].offset
    assert sorted(storage.reads[1:]) == [(begin + 64 * row + 32, BLOCK_BYTES) for row in range(1, 5)]


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    starts = st.tuples(*(st.integers(0, size - 1) for size in shape))
    return starts.flatmap(
        lambda origin: st.tuples(
            *(st.integers(1, size - start) for size, start in zip(shape, origin, strict=True))
        ).map(lambda sizes: Box(origin, sizes))
    )


def saved(tensors: dict[str, torch.Tensor]) -> tuple[MemoryStorage, Manifest]:
    """All of it in one file, and nothing else."""
    storage = MemoryStorage()
    items = [writer.Item(name, Box.whole(tuple(tensor.shape)), tensor) for name, tensor in tensors.items()]
    written = writer.write_items(storage, FOLDER, 0, items, {})
    assert written.file is not None
    return storage, Manifest(
        save_id="id",
        world_size=1,
        made_by="a test",
        files={file_name(0): written.file},
        tensors={
            name: SavedTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), (chunk,))
            for (name, chunk), tensor in zip(written.parts, tensors.values(), strict=True)
        },
        values={},
        per_rank={},
        block_bytes=BLOCK_BYTES,
    )
