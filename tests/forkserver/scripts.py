"""A script in a fork, from its beginning to its end, as `python ARGUMENTS...` would run it.

It begins with its own arguments, variables, folder and streams, as `__main__`. It ends with all that is done at exit,
and takes down its own modules, but not those that the server had loaded: that would touch, and so copy, each page of a
fork's memory, for half a second. What an interpreter does to itself after that takes a tenth of a second, and is left
out.
"""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forkserver.process import WRITERS

ROOM = "DISTTRAIN_TEST_ROOM"
"""A variable that is there for its length: so much room have a script's variables where others look for them."""
ROOM_BYTES = 20_000


class _End:
    exit_code: int | None = None
    """Minus a signal, as subprocess has it; None before the script has ended."""


_end = _End()


def keep_what_is_loaded() -> None:
    """To be called when all is loaded: what is registered to be done at exit before anything else is done last."""
    atexit.register(_end_at_once, {name: module for name, module in sys.modules.items() if name != "__main__"})


def run(request: Mapping[str, Any]) -> None:
    """Run what `process.ForkedProcess` asked for. Its process ends with this, when its threads have ended."""
    _set_up(request)
    arguments = request["arguments"]
    is_unbuffered = arguments[0] == "-u"
    _open_streams(is_unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    exit_code = _exit_code_of(lambda: _run_main(arguments[is_unbuffered:]))
    if _end.exit_code is None:  # else this script is a fork server, and the process a fork of its own
        _end.exit_code = exit_code


def _set_up(request: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    if request["leads"]:
        os.setsid()
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    _show(request["environ"])
    tempfile.tempdir = None  # TMPDIR is the script's own
    if WRITERS in os.environ and (writers := sys.modules.get("tests.forkserver.writers")):
        writers.fork_writers(os.environ[WRITERS])


def _show(environ: Mapping[str, str]) -> None:
    """Write these where others find a process' variables, /proc/PID/environ: in the memory of those it began with."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[47:49])  # env_start and env_end of proc(5)
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environ.items())
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(block[: end - begin].ljust(end - begin, b"\0"))


def _open_streams(is_unbuffered: bool) -> None:
    """As a Python opens its own: whether one is a terminal, or can seek, is looked up once."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = io.TextIOWrapper(
            open(number, "wb", 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
            errors=errors,
            newline="\n",
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_main(arguments: Sequence[str]) -> None:
    if arguments[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[1], vars(sys.modules["__main__"]))  # noqa: S102 -- of a program that would start a Python for it
    elif arguments[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), [*arguments[1:]]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # it runs as __main__, and runpy warns of a second one
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(arguments[0]).parent), [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")


def _exit_code_of(main: Callable[[], None]) -> int:
    """What Python makes of the way in which `main` ends, with what it prints of that."""
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or os.EX_OK) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 -- as an interpreter does
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return os.EX_OK


def _end_at_once(loaded: Mapping[str, ModuleType]) -> None:
    """End the process, with what an interpreter does for the modules that came after these, the last ones first."""
    sys.setswitchinterval(1e6)  # No other thread runs meanwhile.
    for name in tuple(itertools.takewhile(lambda name: name not in loaded, reversed(sys.modules))):
        module = sys.modules.pop(name)
        if isinstance(module, ModuleType):
            vars(module).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    exit_code = _end.exit_code or os.EX_OK
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)
