"""The manifest: what is written is read, and nothing else is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_name
from disttrain.checkpoint.format.encoding import encode
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedFile, SavedTensor, block_checksums
from disttrain.checkpoint.format.reading import decode
from disttrain.checkpoint.format.rules import ITEM_BYTES, have_overlap
from disttrain.errors import CheckpointCorruptError, CheckpointError

FILE = "rank-00000.safetensors"


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """One that makes sense: of a tensor cut into rows, say, whose chunks lie one after the other in the file."""
    block_bytes = 1 << draw(st.integers(3, 20))
    end = 64

    def chunk(box: Box, item_bytes: int) -> Chunk:
        nonlocal end
        offset, num_bytes = end + draw(st.integers(0, 9)), box.num_elements * item_bytes
        end = offset + num_bytes
        num_blocks = -(-num_bytes // block_bytes)
        return Chunk(FILE, offset, num_bytes, box, draw(st.binary(min_size=8, max_size=8)) * num_blocks)

    def value() -> Chunk:
        return chunk(Box.whole((draw(st.integers(0, 300)),)), 1)

    def tensor() -> SavedTensor:
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        most = draw(st.integers(1, 30))
        boxes = [box for box in Box.whole(shape).split(most) if box.num_elements]
        return SavedTensor(shape, "bfloat16", tuple(chunk(box, 2) for box in boxes))

    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), unique=True, max_size=7))
    names = [name for name in names if name not in ("w", "tied")]
    return Manifest(
        save_id="id",
        world_size=draw(st.integers(1, 9)),
        made_by="a test",
        tensors={name: tensor() for name in ["w", *names[:3]]},
        values={name: value() for name in names[3:5]},
        per_rank={name: {0: value(), 11: value()} for name in names[5:]},
        files={FILE: SavedFile(end + draw(st.integers(0, 9)), 64, b"12345678" * -(-64 // block_bytes))},
        same_as={"tied": "w"},
        block_bytes=block_bytes,
    )


@settings(max_examples=25)
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    assert decode(encode(manifest), "m") == manifest


@settings(max_examples=25)
@given(manifests(), st.data())
def test_a_flipped_bit_is_found_or_means_nothing(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(encode(manifest))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    try:
        assert decode(bytes(raw), "m") == manifest
    except CheckpointCorruptError:
        return


@settings(max_examples=25)
@given(manifests(), st.data())
def test_a_cut_is_found(manifest: Manifest, data: st.DataObject) -> None:
    raw = encode(manifest)
    with pytest.raises(CheckpointCorruptError, match="m does not have the bytes that were saved"):
        decode(raw[: data.draw(st.integers(0, len(raw) - 2))], "m")


def sealed(content: object) -> bytes:
    """Content under a right checksum."""
    compact = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({"checksum": xxhash.xxh3_64_hexdigest(compact.encode()), "content": json.loads(compact)}).encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"format": "other"}, "m has format 'other', not 'disttrain-checkpoint'"),
        (
            {"format": "disttrain-checkpoint", "version": 3, "made_by": "disttrain 9"},
            r"m has version 3, this disttrain reads versions 1 to 2. Use the disttrain that wrote it \(disttrain 9\)",
        ),
        ({"format": "disttrain-checkpoint", "version": 1}, "m lacks or misspells 'save_id'"),
    ],
)
def test_what_is_not_ours_is_refused(content: object, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as raised:
        decode(sealed(content), "m")
    assert type(raised.value) is CheckpointError


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{}", b'{"content": 1, "checksum": 2}', b"\xff\xfe", b"[" * 5000]
)
def test_rubbish_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError):
        decode(data, "m")


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 41},
        {"offset": -8},
        {"file": "rank-00001.safetensors"},
        {"checksums": "00" * 7},
        {"bytes": 1 << 41},
        {"shape": 3},
    ],
)
def test_chunks_lie_within_their_files(change: dict[str, object]) -> None:
    value = Chunk(FILE, 64, 8, Box((0,), (8,)), b"12345678")
    manifest = Manifest("id", 1, "a test", {FILE: SavedFile(128, 64, b"12345678")}, {}, {"v": value}, {})
    content = json.loads(encode(manifest))["content"]
    assert decode(sealed(content), "m") == manifest
    content["values"]["v"].update(change)
    with pytest.raises(CheckpointError, match=r"lacks or misspells|contradicts itself"):
        decode(sealed(content), "m")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "a\\b", ""])
def test_files_lie_in_the_folder(name: str) -> None:
    manifest = Manifest("id", 1, "a test", {name: SavedFile(128, 64, b"12345678")}, {}, {}, {})
    with pytest.raises(CheckpointError, match="file name"):
        decode(encode(manifest), "m")


def test_checksums_are_per_block() -> None:
    data = memoryview(bytes(range(10)))
    checksums = block_checksums(data, 4)
    assert checksums == b"".join(xxhash.xxh3_64(data[start : start + 4]).digest() for start in (0, 4, 8))
    assert block_checksums(memoryview(b""), 4) == b""


def test_item_sizes_are_torchs() -> None:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {dtype_name(dtype): dtype.itemsize for dtype in found} == ITEM_BYTES


@given(st.data())
@settings(max_examples=50)
def test_overlaps_are_found(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * data.draw(st.integers(0, 3))))
    boxes = list(Box.whole(shape).split(data.draw(st.integers(1, 9))))
    for _ in range(data.draw(st.integers(0, 2))):
        origin = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(1, size - start)) for start, size in zip(origin, shape, strict=True))
        boxes[data.draw(st.integers(0, len(boxes) - 1))] = Box(origin, sizes)
    expected = any(one.intersection(other) for one, other in itertools.combinations(boxes, 2))
    assert have_overlap(boxes) == expected


def make_sense(change: Callable[[dict[str, Any]], Any]) -> None:
    """Decode a manifest of a tensor in two chunks after a change, under a right checksum."""
    rows = [Chunk(FILE, 64 + 8 * at, 8, Box((at, 0), (1, 2)), b"12345678") for at in range(2)]
    file = SavedFile(80, 64, b"12345678")
    tensors = {"w": SavedTensor((2, 2), "float32", tuple(rows)), "e": SavedTensor((0, 3), "float32", ())}
    content = json.loads(encode(Manifest("id", 1, "a test", {FILE: file}, tensors, {}, {})))["content"]
    change(content)
    decode(sealed(content), "m")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c["tensors"]["w"].update(shape=[200, 2]), "'w' has chunks for 4 of its 400 elements"),
        (lambda c: c["tensors"]["w"]["chunks"][0].update(shape=[1, 1]), "a chunk of 1 elements in 8 bytes"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(origin=[0, 0]), "chunks that lie over each other"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(origin=[1, 1]), r"a chunk of \[1, 2\] at \[1, 1\], not in it"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(offset=68), "begins within what is before it"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(offset=76), "goes beyond the end"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(offset=True), "lacks or misspells the count True"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(offset=72.0), r"the count 72\.0"),
        (lambda c: c["tensors"]["w"]["chunks"][1].update(file=["x"]), "which is no str"),
        (lambda c: c["tensors"]["w"].update(dtype="float64"), "a chunk of 2 elements in 8 bytes"),
        (lambda c: c["tensors"]["w"].update(shape={}), "{}, which is no list"),
        (lambda c: c["tensors"]["e"].update(shape=[0, 10**30]), "no tensor has the shape"),
        (lambda c: c["tensors"]["e"].update(shape=[0, 1 << 62]), "no tensor has the shape"),
        (lambda c: c["tensors"]["e"].update(shape=[0] * 65), "no tensor has the shape"),
        (lambda c: c["files"][FILE].update(checksums=""), "the header of .* has 0 bytes of checksums"),
        (lambda c: c["files"][FILE].update(header_bytes=1 << 60), "the header of"),
        (lambda c: c["files"].update({"a\0": c["files"][FILE]}), "file name 'a"),
        (lambda c: c.update(block_bytes=0), "its blocks have 0 bytes"),
        (lambda c: c.update(block_bytes=1 << 70), "its blocks have"),
        (lambda c: c.update(block_bytes=9), "the header of|cut elements of 'w'"),
        (lambda c: c.update(version=True), "has version True"),
        (lambda c: c.update(values={"w": c["tensors"]["w"]["chunks"][0]}), "'w' is there twice"),
        (lambda c: c.update(values={"\ud800": c["tensors"]["w"]["chunks"][0]}), "is no text"),
        (lambda c: c.update(per_rank={"p": {}}), "a value per rank of no rank"),
        (lambda c: c.update(per_rank={"p": {"01": c["tensors"]["w"]["chunks"][0]}}), "the rank '01'"),
        (lambda c: c.update(same_as={"t": "none"}), "'t' is the same as 'none', which is no tensor"),
        (lambda c: c.update(same_as=[["t", "w"]]), "lacks or misspells"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    make_sense(lambda content: None)
    with pytest.raises(CheckpointError, match=sentence):
        make_sense(change)
