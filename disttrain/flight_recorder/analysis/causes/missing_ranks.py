"""Finds why a rank is missing, from its dump, its ring and its threads' stacks. Torch-free.

Certain signs are checked first: an exception, an end, broken connections. A process that is stopped and one that is out
of reach leave the same signs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from disttrain.flight_recorder.analysis.alignment.match import Match
from disttrain.flight_recorder.analysis.verdict import Cause
from disttrain.flight_recorder.analysis.waiting.wait_graph import Wait
from disttrain.flight_recorder.analysis.wording import location
from disttrain.flight_recorder.dumps.dump import RING, Dump
from disttrain.flight_recorder.dumps.words import EXIT
from disttrain.flight_recorder.record.process.process_state import GONE, STOPPED
from disttrain.flight_recorder.record.process.thread_state import IO_CALLS, RUNNING
from disttrain.flight_recorder.record.record import Failure, Record

_BROKEN: Final = ("connection closed", "connection reset", "broken pipe", "connection refused", "remote process exited")
_IO_FILES: Final = (
    *("/socket.py", "/ssl.py", "/selectors.py", "/subprocess.py", "/http/client.py", "/urllib/request.py"),
    *("/multiprocessing/connection.py", "/multiprocessing/popen_fork.py", "/asyncio/base_events.py"),
)
"""Files of calls that wait for somebody outside the process, where a thread is innermost in one."""
_DEVICE_FILES: Final = ("/torch/cuda/__init__.py", "/torch/cuda/streams.py", "/torch/accelerator/__init__.py")
_OF_TRANSPORTS: Final = {"BackendError", "CollectiveTimeoutError", "StoreConnectionError", "StoreTimeoutError"}
_OF_OTHERS: Final = ("another rank has failed", " has ended: ", "not every rank came, nor can: ", " refused to go on: ")
_LIFELESS_S: Final = 1.0


def is_victim(failure: Failure) -> bool:
    """True for an exception that ends a rank because another has gone wrong."""
    return failure.kind in _OF_TRANSPORTS or any(words in failure.message for words in _OF_OTHERS)


def raised(matched: Match) -> list[int]:
    """Ranks that ended with an exception of their own."""
    failures = {rank: dump.failure for rank, dump in matched.dumps.items()}
    return [rank for rank, failure in failures.items() if failure is not None and not is_victim(failure)]


def is_broken(record: Record) -> bool:
    """True for a failure that says that the process at the other end has gone, in Gloo's words or the system's."""
    error = (record.error or "").lower()
    return any(words in error for words in _BROKEN)


def broke(waits: Iterable[Wait]) -> bool:
    """True when connections broke: the process at their other end has gone."""
    return any(is_broken(wait.record) for wait in waits)


def lifeless(matched: Match) -> list[int]:
    """Ranks that left their ring only, and gave no sign of life for a while before others made their dumps."""
    offsets_s = {rank: dump.clock_offset_s or 0.0 for rank, dump in matched.dumps.items()}
    dumped_s = [dump.dumped_s + offsets_s[rank] for rank, dump in matched.dumps.items() if dump.reason != RING]
    if not dumped_s:
        return []
    last_s = max(dumped_s)
    return [
        rank
        for rank, dump in matched.dumps.items()
        if dump.reason == RING and (dump.process or dump.dumped_s + offsets_s[rank] < last_s - _LIFELESS_S)
    ]


def cause_of_missing(matched: Match, rank: int, *, was_broken: bool) -> tuple[Cause, str]:
    """The cause why `rank` is missing, with half a sentence: `it is in Python at train.py:33 in load`; `was_broken`
    when connections were."""
    dump = matched.dumps.get(rank)
    if dump is None:
        if was_broken:
            return Cause.DEAD, "there is no dump, and connections broke, so that the process has gone"
        return (
            Cause.UNKNOWN,
            "there is no dump, so that the process has died, is stopped, or its dump was not collected",
        )
    if dump.failure is not None:
        failure = dump.failure
        said = f"{failure.kind} ({failure.message})" if failure.message else failure.kind
        return Cause.RAISED, f"it ended with {said} at {location(dump, failure.stack)}"
    if dump.reason == RING:
        return _without_word(dump, was_broken)
    if dump.reason == EXIT:
        return Cause.ENDED, "its script has come to its end"
    cause, text = _at_work(dump)
    failed = [
        f"; its thread {thread.name} has failed ({thread.failure}) at {location(dump, thread.stack)}"
        for thread in dump.threads
        if thread.failure
    ]
    return cause, text + "".join(failed)


def _without_word(dump: Dump, was_broken: bool) -> tuple[Cause, str]:
    if dump.process == GONE:
        return Cause.DEAD, "it left no dump but its last records, and its process is gone: it was killed or crashed"
    if dump.process == STOPPED:
        return Cause.STOPPED, "it left no dump but its last records, and its process is stopped"
    if dump.threads:
        where = location(dump, dump.main_stack)
        return Cause.HOLDS_LOCK, f"it holds the interpreter's lock, or is stopped, at {where}"
    if was_broken:
        return (
            Cause.DEAD,
            "it left no dump but its last records, and connections broke, so that it was killed or crashed",
        )
    why = "it left no dump but its last records, and no connection broke, so that it is stopped, or its node is out of "
    return Cause.STOPPED, why + "reach"


def _at_work(dump: Dump) -> tuple[Cause, str]:
    main = next((thread for thread in dump.threads if thread.is_main), None)
    if main is None:
        return Cause.UNKNOWN, "it dumped, but not where it was"
    where = location(dump, main.stack)
    innermost = main.stack[0].file if main.stack else ""
    if main.stack and innermost.endswith("/threading.py") and main.stack[0].function == "_shutdown":
        return Cause.ENDED, "its script has come to its end, but threads that are no daemons keep its process"
    if dump.is_in_transport:
        return Cause.CONNECTING, f"it is inside an operation that is not on record, perhaps connecting, at {where}"
    if innermost.endswith(_DEVICE_FILES) or (dump.device_is_busy and main.activity == RUNNING):
        return Cause.IN_KERNEL, f"its GPU does not come to the end of what is queued; the host waits for it at {where}"
    call = main.activity.partition(" ")[0]
    if call in IO_CALLS:
        return Cause.IN_IO, f"it waits in a system call ({main.activity}) at {where}"
    if not main.activity and innermost.endswith(_IO_FILES):
        return Cause.IN_IO, f"it waits for something outside its process at {where}"
    return Cause.IN_PYTHON, f"it is in Python at {where}" + _how(main.activity)


def _how(activity: str) -> str:
    if activity == RUNNING:
        return ", computing"
    if activity.endswith("nanosleep"):
        return ", asleep"
    return ", waiting for a lock or another thread" if activity == "futex" else ""
