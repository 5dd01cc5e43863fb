"""Files written by direct I/O have the bytes that they were given, however those lie in memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.checkpoint.storage import direct

PIECE_BYTES = 4 * direct.PAGE_BYTES
SOURCE = mmap.mmap(-1, 1 << 18)
SOURCE.write(os.urandom(1 << 18))

cuts = st.tuples(st.integers(0, 5 * direct.PAGE_BYTES), st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 30_000, 70_000]))


@pytest.fixture(autouse=True)
def no_piece_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIRECT_BYTES", 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(cuts, max_size=8), st.booleans(), st.sampled_from([1, 3 * direct.PAGE_BYTES]))
def test_parts_of_any_size_anywhere_in_memory(
    parts: list[tuple[int, int]], lies_alike: bool, direct_bytes: int
) -> None:
    """`lies_alike`: each part lies in memory as in the file, modulo pages; it is then written from there."""
    views, offset = [], 0
    for start, size in parts:
        begin = start // direct.PAGE_BYTES * direct.PAGE_BYTES + offset % direct.PAGE_BYTES if lies_alike else start
        views.append(memoryview(SOURCE)[begin : begin + size])
        offset += size
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_PIECE_BYTES", PIECE_BYTES)
        patch.setattr(direct, "DIRECT_BYTES", direct_bytes)
        path = Path(folder) / "file"
        direct.write_file(path, views)
        assert path.read_bytes() == b"".join(bytes(view) for view in views)


@pytest.mark.parametrize("has_room", [True, False])
def test_room_that_was_not_needed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    reserved, real = [], direct._reserve

    def reserve(descriptor: int, num_bytes: int) -> None:
        reserved.append(num_bytes)
        if has_room:
            real(descriptor, num_bytes)

    monkeypatch.setattr(direct, "_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(direct, "_RESERVED_BYTES", 2 * PIECE_BYTES)
    monkeypatch.setattr(direct, "_reserve", reserve)
    data = memoryview(SOURCE)[: 5 * PIECE_BYTES + 77]
    direct.write_file(tmp_path / "file", [data])
    assert reserved == [2 * PIECE_BYTES, 4 * PIECE_BYTES, 6 * PIECE_BYTES]
    assert (tmp_path / "file").read_bytes() == bytes(data)
    # A page for the 77 bytes; another one lists the parts of a file that lies in many.
    assert (tmp_path / "file").stat().st_blocks * 512 <= 5 * PIECE_BYTES + 2 * 4096
    direct.write_file(tmp_path / "small", [data[:100]])
    assert len(reserved) == 3


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    data = memoryview(SOURCE)[5:200_000]
    direct.write_file(tmp_path / "file", [data[:10], data[10:]])
    assert (tmp_path / "file").read_bytes() == bytes(data)


def test_a_file_system_that_refuses_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has opened the file for them all the same."""
    real, num_refused = os.pwrite, 0

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal num_refused
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            num_refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(direct, "_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(os, "pwrite", refuse)
    data = memoryview(SOURCE)[: 5 * PIECE_BYTES + 77]
    direct.write_file(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == bytes(data)
    assert num_refused


@pytest.mark.parametrize(
    ("num_free", "reserved"), [(63, []), (64, [1, 2, 3]), (2 * 64, [2, 4]), (3 * 64, [3]), (99 * 64, [5])]
)
def test_no_more_room_is_taken_than_others_can_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_free: int, reserved: list[int]
) -> None:
    """In pieces: of 1 GiB taken in advance by each of several ranks the last ones would find nothing left."""
    rooms: list[int] = []
    monkeypatch.setattr(direct, "_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(direct, "_RESERVED_BYTES", 5 * PIECE_BYTES)
    monkeypatch.setattr(direct, "_free_bytes", lambda _: num_free * PIECE_BYTES)
    monkeypatch.setattr(direct, "_reserve", lambda _, num_bytes: rooms.append(num_bytes // PIECE_BYTES))
    data = memoryview(SOURCE)[: 3 * PIECE_BYTES + 77]
    direct.write_file(tmp_path / "file", [data])
    assert rooms == reserved
    assert (tmp_path / "file").read_bytes() == bytes(data)


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        direct.write_file(tmp_path / "file", [memoryview(b"new")])
    assert (tmp_path / "file").read_bytes() == b"mine"
