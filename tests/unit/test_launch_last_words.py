"""The end of a worker's stderr: which traceback ended it, whose fault it was, and what of it is shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_launch.output.failure.dump_exchange import pack, unpack
from disttrain_launch.output.streams.holding import HOLD_S, HoldingVoice, without_frames
from disttrain_launch.workers import last_words
from disttrain_launch.workers.outcome import Failed, Interrupted, Lost, Requeued, outweighs

CHAINED = """\
step 1
Traceback (most recent call last):
  File "train.py", line 3, in load
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise ValueError("bad\\nbatch")
ValueError: bad
batch
"""
RAISED = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise ValueError("bad")
ValueError: bad
"""
TORCHS = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]:     dist.all_reduce(x)
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a
[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
"""


def test_the_last_traceback_is_taken_with_those_that_led_to_it() -> None:
    earlier = "Traceback (most recent call last):\n  x\nOSError: logged\nwent on\n"
    assert last_words.excerpt(earlier + CHAINED) == CHAINED.rstrip("\n").partition("\n")[2]
    assert last_words.summary(earlier + CHAINED) == "ValueError: bad"
    assert not last_words.is_consequence(CHAINED)
    assert last_words.excerpt("a\n10%\r20%\n\n") == "a\n20%"
    assert last_words.summary("a\nb") == ""


def test_the_last_line_is_the_script_s_own() -> None:
    """Such as argparse's or that of `sys.exit(text)`; transports may log after it."""
    logged = "[W1127 08:24:08.1 ProcessGroup.cpp:1] Warning: a group was left\n[rank1]:[W1127 08:24:08.1 a.cpp:1] b\n"
    assert (
        last_words.last_line(f"usage: a.py\n10%\ra.py: error: no such file\n{logged}\n") == "a.py: error: no such file"
    )
    assert last_words.last_line(logged) == last_words.last_line("") == ""


@pytest.mark.parametrize(
    "message",
    [
        "disttrain.errors.BackendError: all_reduce: the transport failed: [pair.cc] Connection closed by peer [::1]:2",
        "disttrain.errors.CollectiveMismatchError: barrier: not every rank came, nor can: rank 0 has left the job.",
        "disttrain.errors.CollectiveMismatchError: barrier: rank 1 refused all_reduce: it is a list.",
        "CollectiveTimeoutError: barrier: not every rank came within 5 s: rank 1 is; its thread a has failed (Key",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection reset by peer",
    ],
)
def test_who_lost_a_peer_is_not_to_blame(message: str) -> None:
    said = f"Traceback (most recent call last):\n  File\n{message}\n"
    assert last_words.is_consequence(said)
    assert last_words.is_consequence(TORCHS)
    assert last_words.summary(TORCHS).startswith("torch.distributed.DistBackendError: NCCL error")
    assert not last_words.is_consequence(f"{message}\n" + CHAINED)


def test_of_a_thread_that_has_failed_the_name_is_taken_too() -> None:
    said = "Exception in thread loader:\n" + CHAINED.partition("\n")[2]
    assert last_words.excerpt("step 1\n" + said) == said.rstrip("\n")
    assert last_words.is_own_error(said)


def test_what_python_has_ignored_has_ended_nothing() -> None:
    ignored = "Exception ignored in atexit callback: <function <lambda> at 0x7f1b>\n" + RAISED.replace("bad", "5")
    assert last_words.summary(RAISED + ignored) == "ValueError: bad"
    assert last_words.excerpt(RAISED + ignored + "the end\n") == RAISED + "the end"
    # Where there is nothing else it may say why all the same.
    assert last_words.summary("step 1\n" + ignored) == "ValueError: 5"


@pytest.mark.parametrize("unfinished", ["loading 50%", "0%\r80%", " 50%|##  | 5/10 [00:01, 3.0it/s]", "\ufffd\ufffd"])
def test_a_traceback_behind_an_unfinished_line_is_one(unfinished: str) -> None:
    assert last_words.excerpt(unfinished + RAISED) == RAISED.rstrip("\n")
    assert last_words.summary(unfinished + RAISED) == "ValueError: bad"
    shown = Shown()
    voice = HoldingVoice(shown)
    voice.show_lines((unfinished + RAISED).encode())
    assert shown.lines.decode() == unfinished + "\n"
    assert voice.held.decode() == RAISED


def test_of_a_stack_whose_beginning_is_lost_and_of_a_text_with_a_traceback_there_is_a_summary() -> None:
    frames = '  File "train.py", line 3, in down\n    other(n)\n    ^^^^^^^^\n' * 100
    assert last_words.summary(f"{frames}ValueError: bad\nbatch\n") == "ValueError: bad"
    with_text = RAISED + "second line\n\nTraceback (most recent call last):\n not one\n"
    assert last_words.summary(with_text) == "ValueError: bad"
    assert last_words.excerpt("step 1\n" + with_text) == with_text.rstrip("\n")


def test_an_exception_group_has_a_summary_and_its_parts_count() -> None:
    group = traceback.format_exception(ExceptionGroup("two", [ValueError("bad"), ExceptionGroup("in", [OSError("x")])]))
    lone = traceback.format_exception(_raised(ExceptionGroup("one", [OSError("Broken pipe")])))
    chained = traceback.format_exception(_raised(_raised(ExceptionGroup("two", [_raised(ValueError("bad"))]))))
    assert last_words.summary("".join(group)) == ""  # It was never raised, and there is no traceback.
    assert last_words.summary("".join(lone)) == "ExceptionGroup: one (1 sub-exception)"
    assert last_words.is_consequence("".join(lone))
    assert last_words.summary("step 1\n" + "".join(chained)) == "ExceptionGroup: two (1 sub-exception)"
    assert last_words.is_own_error("".join(chained))


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001
        return raised


def test_what_cpp_has_not_caught_is_read_as_well() -> None:
    said = (
        "[rank1]:[E1126 10:00:00.123456 ProcessGroupNCCL.cpp:2057] Process group watchdog thread terminated\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG ID 0 Rank 1] NCCL error: remote process exited or there was a network error\n"
        "frame #0: c10::Error::Error + 0x98\n"
    )
    assert last_words.is_consequence(CHAINED + said)
    assert last_words.summary(said).startswith("[PG ID 0 Rank 1] NCCL error: remote")
    shown = Shown()
    voice = HoldingVoice(shown)
    voice.show_lines(b"before\n" + said.encode())
    assert shown.lines == b"before\n"
    voice.release()
    voice.close()
    assert shown.lines.decode().splitlines()[-1] == "(1 line of a C++ stack; --verbose shows it)"


def test_a_rank_to_blame_outweighs_one_that_lost_it() -> None:
    def failed(*, is_consequence: bool) -> Failed:
        return Failed(0, 0, 0, "host", 1, 1, 1.0, "", "", "", is_consequence)

    own, lost = failed(is_consequence=False), failed(is_consequence=True)
    assert outweighs(own, lost)
    assert not any((outweighs(lost, own), outweighs(own, own), outweighs(lost, lost)))
    assert outweighs(Requeued(0, 0, "host"), Interrupted(15, 0, "host"))
    assert not outweighs(own, Interrupted(15, 0, "host"))
    store_gone = Lost("node 0's store went away")
    assert outweighs(store_gone, lost)
    assert not outweighs(store_gone, own)


class Shown:
    """A voice that keeps what it is given."""

    def __init__(self) -> None:
        self.lines = b""

    def show_lines(self, lines: bytes) -> None:
        self.lines += lines

    def show_bar(self, text: bytes, *, is_bar: bool) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_traceback_is_held_and_shown_of_who_lives_on() -> None:
    now_s = 5.0
    shown = Shown()
    voice = HoldingVoice(shown, lambda: now_s)
    voice.show_lines(b"one\nTraceback (most recent call last):\n  File\n")
    voice.show_lines(b"Error: x\nmore\n")
    assert shown.lines == b"one\n"
    assert voice.deadline_s == now_s + HOLD_S
    voice.release()
    assert voice.deadline_s is None
    assert shown.lines.endswith(b"File\nError: x\nmore\n")
    voice.show_lines(b"two\n")
    assert shown.lines.endswith(b"more\ntwo\n")


@given(st.lists(st.sampled_from(["a", "frame #0: f() at x.cpp:1", "frame #11: g", "b"]), max_size=12), st.data())
def test_stacks_of_cpp_are_counted_wherever_reads_are_cut(lines: list[str], data: st.DataObject) -> None:
    shown = Shown()
    voice = HoldingVoice(shown)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lines)), max_size=3)))
    for begin, end in zip([0, *cuts], [*cuts, len(lines)], strict=True):
        voice.show_lines("".join(f"{line}\n" for line in lines[begin:end]).encode())
    voice.close()
    text = shown.lines.decode()
    assert text.rstrip("\n") == without_frames("\n".join(lines))
    assert "frame #" not in text
    assert [line for line in text.splitlines() if len(line) == 1] == [line for line in lines if len(line) == 1]


def test_dumps_travel_within_limits_and_under_names_of_dumps_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    names = ["rank-00000.job.flight", "rank-00001.job.ring", "rank-00001.job.stacks"]
    for name in [*names, "other", "rank-00002.job.txt"]:
        (source / name).write_text(name)
    (source / "rank-00003.job.ring").symlink_to(source / "other")
    unpack(pack(source, 2), target)
    assert sorted(file.name for file in target.iterdir()) == names
    assert (target / names[0]).read_text() == names[0]
    assert pack(source, 1 << 40) == pack(tmp_path / "source" / "..", 2)
    with pytest.raises(ValueError, match="no dump"):
        unpack(msgpack.packb({"../rank-1.ring": b""}), target)
    with pytest.raises(ValueError, match="no dumps"):
        unpack(msgpack.packb([]), target)


FATAL = """\
Fatal Python error: Segmentation fault

Thread 0x00007f3eb37fe6c0 (most recent call first):
  File "channel.py", line 213 in _await
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Current thread 0x00007f3ed8a7c040 (most recent call first):
  File "train.py", line 6 in load_batch
  File "train.py", line 7 in <module>

Extension modules: numpy.linalg._umath_linalg, torch._C (total: 2)
"""


def test_of_a_signal_the_stack_of_the_thread_that_it_came_to_is_told() -> None:
    told = last_words.excerpt(f"a line\n{FATAL}")
    assert told.splitlines() == [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f3ed8a7c040 (most recent call first):",
        '  File "train.py", line 6 in load_batch',
        '  File "train.py", line 7 in <module>',
    ]
    assert last_words.summary(FATAL) == "Fatal Python error: Segmentation fault"
    ending = "terminate called after throwing an instance of 'c10::Error'\n  what():  Broken pipe\n"
    assert last_words.summary(ending + FATAL) == last_words.summary(ending) == "Broken pipe"
    assert last_words.is_consequence(ending + FATAL)
    assert last_words.excerpt(ending + FATAL).startswith("terminate called")
