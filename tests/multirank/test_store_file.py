"""What only a FileStore has to survive: other processes that write, die in mid-record, fork, or never come."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import FileStore

COUNTER = """
import sys
from disttrain.store import FileStore
store = FileStore(sys.argv[1], timeout=240.0)
store.barrier("start", 4)
for _ in range(100):
    store.add("counter", 1)
store.barrier("end", 4)
print(store.get("counter").decode())
"""


def test_processes_share_a_counter_and_barriers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTER, str(tmp_path / "store")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [worker.communicate(timeout=240)[0] for worker in workers] == ["400\n"] * 4


@pytest.mark.parametrize("num_bytes", [1, 4, 7, 8, 9, 20])
def test_a_record_that_its_writer_did_not_finish_is_cut_off(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "store"
    store = FileStore(path, timeout=60.0)
    store.set("a", "1")
    whole_bytes = path.stat().st_size
    store.set("b", "a value that is longer than the next one")
    os.truncate(path, whole_bytes + num_bytes)
    other = FileStore(path, timeout=60.0)
    assert other.get("a") == b"1"
    assert not other.check(["b"])
    other.set("c", "2")
    third = FileStore(path, timeout=60.0)
    assert third.multi_get(["a", "c"]) == [b"1", b"2"]
    assert third.num_keys() == 2
    for each in (store, other, third):
        each.close()


def test_a_damaged_record_is_an_error_and_not_a_value(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path)
    store.set("a", "value")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    other = FileStore(path)
    with pytest.raises(StoreError, match=r"record at byte 0 is damaged\. Each job needs a new file"):
        other.get("a")
    other.close()
    store.close()


def test_the_file_is_ours_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o600
    store.close()


def test_the_last_of_world_size_users_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = FileStore(path, 2), FileStore(path, 2)
    clone = first.clone()
    clone.close()
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="FileStore: the file cannot be opened: No such file"):
        FileStore(tmp_path / "none" / "store")


def test_a_lock_that_is_never_let_go_hangs_nobody(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", timeout=0.2)
    with (tmp_path / "store").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        started_s = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="held the file's lock"):
            store.set("a", "1")
        assert time.monotonic() - started_s < 40.0
        assert not store.check(["a"])
    store.set("a", "1")
    assert store.get("a") == b"1"
    store.close()


def test_a_forked_child_goes_on_with_a_view_of_its_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", timeout=60.0)
    store.set("a", "1")
    child = os.fork()
    if child == 0:
        store.set("b", store.get("a") + b" from the child")
        os._exit(0)
    assert store.get("b") == b"1 from the child"
    assert os.waitpid(child, 0)[1] == 0
    store.close()


def test_threads_of_one_process_wait_side_by_side(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", timeout=30.0)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.get, f"k{number}") for number in range(8)]
        other = FileStore(tmp_path / "store")
        for number in range(8):
            other.set(f"k{number}", str(number))
        assert [future.result() for future in waiting] == [str(number).encode() for number in range(8)]
    other.close()
    store.close()
