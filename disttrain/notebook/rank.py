"""A rank that was forked from a running Python: leaves what belongs to its parent, calls the function, and reports.

It is the fork of a thread that was made for it. Thread pools of OpenMP belong to the thread that began them, and a fork
has none of their workers: in the fork of a thread that had computed before, the first parallel operator would wait for
them for ever.
"""

from __future__ import annotations

import atexit
import builtins
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch

from disttrain import settings
from disttrain.devices import num_gpus
from disttrain.errors import LaunchError, ShapeError
from disttrain.notebook._torch import has_lost_gpus
from disttrain.process_group import destroy_process_group, is_initialized
from disttrain.process_group.calls.packing import pack

VALUE: Final = "value"
ERROR: Final = "error"
AT_S: Final = "at_s"
OPERATION: Final = "launch"
GPUS_USED: Final = "the process that ranks are forks of has used its GPUs, and no fork can use them then."
GPUS_REMEDY: Final = "Restart the kernel, and use GPUs in nothing but the function that is launched."
_ABOUT_FORKS: Final = ("forked subprocess", "fork-based multiprocessing")
"""In torch's errors for a fork of a process that has used its GPUs."""


@dataclass(frozen=True)
class Task:
    """The function that each rank calls, and the variables that tell it its place."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    variables: Mapping[str, str]
    num_threads: int | None


def run_rank(task: Task, stdout: int, stderr: int, report: int) -> None:
    """The rank's whole life. Descriptors: of its two streams, and where its packed report goes."""
    os.setsid()  # An interrupt is for the parent, which decides what becomes of its ranks.
    _take_streams(stdout, stderr)
    _leave_parent()
    for name, value in task.variables.items():
        settings.set_for_libraries(name, value)
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    has_failed = False
    try:
        data = _packed(_result(task))
    except BaseException as error:  # noqa: BLE001 -- it is the answer
        has_failed = True
        data = pack({ERROR: _told(error), AT_S: time.monotonic()})
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(report, "wb") as stream:
        stream.write(data)
    if has_failed:
        os._exit(1)  # A transport's thread may still wait for a peer: leave without asking it.


def _result(task: Task) -> Any:
    """Returns what the function returns, once all that a script does at its end is done."""
    if num_gpus(settings.environment()) and has_lost_gpus():
        raise LaunchError(OPERATION, GPUS_USED, GPUS_REMEDY)
    try:
        value = task.function(*task.args, **task.kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    except RuntimeError as error:
        # A backward on CPUs makes the driver ready for GPUs, too, which torch doesn't know.
        if torch.cuda.is_initialized() or "CUDA error: initialization error" not in str(error):
            raise
        raise LaunchError(OPERATION, GPUS_USED, GPUS_REMEDY) from error
    if is_initialized():
        destroy_process_group()
    atexit._run_exitfuncs()
    return value


def _packed(value: Any) -> bytes:
    try:
        return pack({VALUE: value})
    except ShapeError as error:
        # The innermost of values within values. A DTensor would be gathered, of which the job's end knows nothing.
        cause = str(error).rpartition("cannot travel: ")[2].partition(f". {error.remedy}")[0]
        cause = "a DTensor is in parts" if "has been destroyed" in cause else cause
        problem = f"what the function has returned cannot travel: {cause}."
        remedy = "Return plain values, tensors or arrays: of a DTensor its full_tensor(), of a model its state_dict()."
        raise ShapeError(OPERATION, problem, remedy) from None


def _take_streams(stdout: int, stderr: int) -> None:
    """Have all that writes, libraries in C among them, write to these."""
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    before = {id(sys.stdout): 1, id(sys.__stdout__): 1, id(sys.stderr): 2, id(sys.__stderr__): 2}
    streams = {
        number: os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False) for number in (1, 2)
    }
    sys.stdout, sys.stderr = streams[1], streams[2]
    for handler in _handlers():
        if id(handler.stream) in before:
            handler.stream = streams[before[id(handler.stream)]]


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Of all loggers."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler


def _leave_parent() -> None:
    """Undo what the parent has arranged for itself: signals, exit handlers, a notebook's way to show things."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit._clear()
    threading.Thread(target=_end_with_parent, name="disttrain parent watch", daemon=True).start()
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        shell.display_pub.publish = _print_plain
        builtins.input = _no_input


def _print_plain(data: Mapping[str, Any], *_args: object, **_options: object) -> None:
    """In place of a message to the notebook, which only its own process can send."""
    print(data.get("text/plain", ""))  # noqa: T201


def _no_input(prompt: object = "") -> str:
    raise EOFError("a rank has no input: ask before launch, and hand the answer over")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _told(error: BaseException) -> str:
    """The traceback from the function on, as Python prints it."""
    text = "".join(traceback.format_exception(type(error), error, _from_function(error.__traceback__)))
    if any(words in text for words in _ABOUT_FORKS):
        text += f"\n{OPERATION}: {GPUS_USED}\n{GPUS_REMEDY}"
    return text.rstrip("\n").encode(errors="backslashreplace").decode()


def _from_function(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames
