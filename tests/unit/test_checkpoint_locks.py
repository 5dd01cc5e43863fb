"""Locks that end with their process: who looks disturbs nobody, forks keep none, and half-taken ones are found."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from disttrain.checkpoint.storage.base import LocalStorage
from disttrain.checkpoint.storage.folders import remove_leftovers
from disttrain.checkpoint.storage.locks import is_locked, lock


def test_a_lock_is_held_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert is_locked(path) is False
    with lock(path):
        assert is_locked(path) is True
        assert os.listdir(tmp_path) == ["x.lock"]
    assert os.listdir(tmp_path) == []


def test_who_looks_is_no_owner(tmp_path: Path) -> None:
    """Two that look at the same time, at what a dead process has left."""
    path = tmp_path / "x.lock"
    path.touch()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert is_locked(path) is False


def test_a_fork_that_outlives_its_parent_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    ready, is_ready = os.pipe()
    end, ending = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(ending)
        with lock(path):
            if os.fork() == 0:
                os.write(is_ready, b"1")  # the fork runs: it has let go of what it was born with
            os.read(end, 1)
        os._exit(0)
    os.read(ready, 1)
    assert is_locked(path) is True
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert is_locked(path) is False
    for descriptor in (ready, is_ready, end, ending):
        os.close(descriptor)


def test_a_lock_that_was_removed_before_it_was_held_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, storage, is_first = fcntl.flock, LocalStorage(), True
    target = tmp_path / f"save.tmp-{'0' * 32}"

    def flock(descriptor: int, how: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            assert storage.remove_unless_held(target)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with storage.hold(target):
        assert storage.is_held(target)
        assert not storage.remove_unless_held(target)
        assert os.listdir(tmp_path) == [f"{target.name}.lock"]
    assert os.listdir(tmp_path) == []


def test_a_lock_whose_name_cannot_be_removed_is_not_held_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = tmp_path / "x.lock"
    with pytest.raises(OSError, match="Read-only"), lock(path):
        monkeypatch.setattr(Path, "unlink", refuse)
    assert is_locked(path) is False


def test_a_finalizer_may_let_go_of_a_lock_while_another_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a claim, which the garbage collector calls wherever it is."""
    first = lock(tmp_path / "first.lock")
    first.__enter__()
    real = os.open

    def collect(path: Path, flags: int, mode: int) -> int:
        monkeypatch.setattr(os, "open", real)
        first.__exit__(None, None, None)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", collect)
    with lock(tmp_path / "second.lock"):
        assert os.listdir(tmp_path) == ["second.lock"]
    assert os.listdir(tmp_path) == []


def test_what_died_while_it_took_its_lock_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"save.tmp-{'0' * 32}.new.lock").touch()
    remove_leftovers(LocalStorage(), tmp_path, lambda name: name == "save")
    assert os.listdir(tmp_path) == []
