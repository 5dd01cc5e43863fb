"""Files that threads share: opened once, closed after the last use, and told of what went wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disttrain.checkpoint.storage import open_files
from disttrain.checkpoint.storage.local_file import LocalFile, aligned_memory
from disttrain.checkpoint.storage.open_files import OpenFiles


class NoBytes:
    num_bytes = 0

    def read_at(self, offset: int, buffer: memoryview) -> int:
        raise OSError("gone")


def test_a_file_is_open_from_its_first_use_to_its_last() -> None:
    events = []

    @contextmanager
    def opened(name: str) -> Iterator[NoBytes]:
        events.append(f"open {name}")
        yield NoBytes()
        events.append(f"close {name}")

    with OpenFiles(opened, ["a", "b", "a"]) as files:
        for name in ("a", "b", "a"):
            with files.use(name):
                events.append(name)
    assert events == ["open a", "a", "open b", "b", "close b", "a", "close a"]


def test_few_files_are_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that rest longest are closed, and opened again when they are needed."""
    monkeypatch.setattr(open_files, "MOST_IDLE", 2)
    events, num_open = [], 0

    @contextmanager
    def opened(name: str) -> Iterator[NoBytes]:
        nonlocal num_open
        num_open += 1
        assert num_open <= 3
        events.append(name)
        yield NoBytes()
        num_open -= 1

    with OpenFiles(opened, "abcdabcd") as files:
        for name in "abcdabcd":
            with files.use(name):
                pass
    assert "".join(events) == "abcdab"
    assert num_open == 0


def test_a_file_hears_of_its_own_errors_and_no_other_does() -> None:
    heard = []

    @contextmanager
    def opened(name: str) -> Iterator[NoBytes]:
        try:
            yield NoBytes()
        except OSError as error:
            heard.append(name)
            raise ValueError(f"{name}: {error}") from error
        heard.append(f"close {name}")

    def use_both() -> None:
        with OpenFiles(opened, ["a", "a", "b"]) as files:
            with files.use("a"):
                pass
            with files.use("b") as file:
                file.read_at(0, memoryview(b""))

    with pytest.raises(ValueError, match="b: gone"):
        use_both()
    assert heard == ["close a", "b"]


def test_of_several_that_fail_the_one_that_is_told_of_hears() -> None:
    heard = []

    @contextmanager
    def opened(name: str) -> Iterator[NoBytes]:
        try:
            yield NoBytes()
        except OSError as error:
            heard.append((name, str(error)))
            raise

    def use_both() -> None:
        errors = []
        with OpenFiles(opened, "ab") as files:
            for name in "ab":
                try:
                    with files.use(name):
                        raise OSError(f"{name} is damaged")
                except OSError as error:
                    errors.append(error)
            raise errors[0]

    with pytest.raises(OSError, match="a is damaged"):
        use_both()
    assert heard == [("a", "a is damaged")]


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 3 << 20), (5, 2 << 20), (4096, 1 << 20), (100, 50), (2 << 20, 9 << 20)]
)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_direct_and_cached_reads_bring_the_same(tmp_path: Path, offset: int, size: int, is_aligned: bool) -> None:
    """Also beyond the end of a file that does not end with a page."""
    data = bytes(range(251)) * 20_000
    (tmp_path / "file").write_bytes(data)
    first = offset % 4096 + (0 if is_aligned else 64)
    buffer = aligned_memory(size + 8192)[first : first + size]
    file = LocalFile(tmp_path / "file")
    try:
        num_read = file.read_at(offset, buffer)
    finally:
        file.close()
    assert bytes(buffer[:num_read]) == data[offset : offset + size]
    assert num_read == max(min(size, len(data) - offset), 0)
