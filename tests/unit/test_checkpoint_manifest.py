"""The manifest: what is written is read, and nothing else is."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint.box import Box
from disttrain.checkpoint.manifest import Chunk, Manifest, SavedFile, SavedTensor, block_checksums, decode, encode
from disttrain.errors import CheckpointCorruptError, CheckpointError

SIZES = st.integers(0, 1 << 50)
FILE = "rank-00000.safetensors"


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    block_bytes = 1 << draw(st.integers(3, 20))

    def chunk(num_dims: int = 1) -> Chunk:
        num_blocks = draw(st.integers(0, 3))
        origin = tuple(draw(st.lists(SIZES, min_size=num_dims, max_size=num_dims)))
        return Chunk(
            FILE,
            64,
            num_blocks * block_bytes,
            Box(origin, origin),
            draw(st.binary(min_size=8, max_size=8)) * num_blocks,
        )

    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    return Manifest(
        save_id="id",
        world_size=draw(st.integers(1, 9)),
        made_by="a test",
        files={FILE: SavedFile(1 << 40, 64, b"12345678")},
        tensors={
            name: SavedTensor(shape, "bfloat16", (chunk(len(shape)), chunk(len(shape))))
            for name in {"w", *draw(st.sets(names, max_size=3))}
            for shape in [tuple(draw(st.lists(SIZES, max_size=3)))]
        },
        values={name: chunk() for name in draw(st.sets(names, max_size=2))},
        per_rank={name: {0: chunk(), 11: chunk()} for name in draw(st.sets(names, max_size=2))},
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
            {"format": "disttrain-checkpoint", "version": 2, "made_by": "disttrain 9"},
            r"m has version 2, this disttrain reads version 1. Use the disttrain that wrote it \(disttrain 9\)",
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
    with pytest.raises(CheckpointError, match="lacks or misspells"):
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
