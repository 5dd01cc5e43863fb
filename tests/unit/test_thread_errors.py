"""What ends a thread is kept, for whoever asks why another thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from disttrain._python.thread_errors import ThreadErrors
from disttrain.flight_recorder.dumps.dump import encode
from disttrain.flight_recorder.dumps.reading.reader import decode
from disttrain.flight_recorder.record.process.python_stacks import failed_threads, failure_of
from tests.unit.flight_ranks import Rank


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of what the hook that was there before is told."""
    kinds: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: kinds.append(args.exc_type.__name__))
    return kinds


@pytest.fixture
def errors(told: list[str]) -> Iterator[ThreadErrors]:
    errors = ThreadErrors()
    yield errors
    errors.close()


def load(error: BaseException) -> None:
    raise error


def end_thread(run: Callable[..., object], *arguments: object, name: str = "loader") -> None:
    thread = threading.Thread(target=run, args=arguments, name=name)
    thread.start()
    thread.join()


def test_what_ends_a_thread_is_kept_and_passed_on(errors: ThreadErrors, told: list[str]) -> None:
    end_thread(load, ValueError("bad batch 17\nof shard 3"))
    end_thread(load, Wordless())
    assert [str(error) for error in errors.kept] == [
        "its thread loader has failed (ValueError: bad batch 17)",
        f"its thread loader has failed ({__name__}.Wordless: <exception str() failed>)",
    ]
    assert [name for _, _, name in errors.kept[0].stack] == ["load", "run", "_bootstrap_inner"]
    assert told == ["ValueError", "Wordless"]


def test_a_thread_that_leaves_and_what_comes_after_many_are_not_kept(errors: ThreadErrors, told: list[str]) -> None:
    end_thread(load, SystemExit(3))
    for number in range(20):
        end_thread(load, ValueError(str(number)))
    assert [error.text for error in errors.kept] == [f"ValueError: {number}" for number in range(8)]
    assert len(told) == 21


def test_the_hook_goes_back_unless_another_was_put_before_it(errors: ThreadErrors) -> None:
    ours = threading.excepthook
    second = ThreadErrors()
    errors.close()
    assert threading.excepthook is not ours
    second.close()
    assert threading.excepthook is ours


def test_a_dump_has_the_threads_that_have_failed(errors: ThreadErrors) -> None:
    end_thread(load, ValueError("bad batch 17"))
    dump = replace(Rank(0, 2).call("barrier", 5).dump(), threads=failed_threads(errors))
    (thread,) = decode(encode(dump)).threads
    assert (thread.name, thread.failure, thread.stack[0].function) == ("loader", "ValueError: bad batch 17", "load")
    assert failed_threads(None) == ()


def test_an_exception_that_cannot_be_printed_is_recorded_all_the_same() -> None:
    assert failure_of(Wordless()).message == "whose text cannot be had"
