"""`disttrain-launch`: argv in, exit code out.

The first argument may name a command; `run` is the one that is meant without. A script of such a name is `./submit`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from disttrain import settings
from disttrain.devices import num_gpus
from disttrain.errors import DisttrainError, LaunchError
from disttrain_launch.clusters.cluster_flags import placed
from disttrain_launch.request.flags import misplaced, parse
from disttrain_launch.request.job import NOT_STARTED, OPERATION
from disttrain_launch.request.request import job_spec

# What a machine may run out of at any step, and what to do then.
_SHORTAGES = {
    errno.E2BIG: "Shorten the script's arguments, or the environment.",
    errno.EMFILE: "Raise ulimit -n, or start fewer workers.",
    errno.ENFILE: "End some of its processes.",
    errno.EAGAIN: "Raise ulimit -u, or start fewer workers.",
    errno.ENOMEM: "Start fewer workers.",
    errno.ENOSPC: "Make room, or set TMPDIR to another folder.",
    errno.EDQUOT: "Make room, or set TMPDIR to another folder.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `disttrain-launch` and return its exit code."""
    # Until there is something to clean up, an interrupt ends us as it ends any program, without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(arguments[0]) if arguments else None
    try:
        if command is None:
            _check_word(arguments)
            return _run(arguments)
        return command(arguments[1:])
    except DisttrainError as error:
        print(error if error.operation.startswith(OPERATION) else f"{OPERATION}: {error}", file=sys.stderr, flush=True)
        return NOT_STARTED
    except OSError as error:
        remedy = _SHORTAGES.get(error.errno or 0)
        if remedy is None:
            raise
        print(f"{OPERATION}: a limit of this machine: {error.strerror}. {remedy}", file=sys.stderr, flush=True)
        return NOT_STARTED


def _check_word(argv: Sequence[str]) -> None:
    """Raise LaunchError where the first argument is no script, but nearly a command."""
    word = argv[0] if argv else ""
    near = difflib.get_close_matches(word, _COMMANDS, 1) if word.isalpha() else []
    if near and not Path(word).exists():
        problem = f"{word} is neither a command nor a script that there is."
        raise LaunchError(OPERATION, problem, f"Did you mean {near[0]}?")


def _run(argv: Sequence[str]) -> int:
    environ = settings.environment()
    args = parse(argv, environ)
    if args.new_token is not None:
        return _write_new_token(args.new_token)
    return _start(args, environ)


def _doctor(argv: Sequence[str]) -> int:
    environ = settings.environment()
    of_doctor = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_doctor.add_argument("--json", action="store_true")
    of_doctor.add_argument("--links", metavar="FILE")
    options, flags = of_doctor.parse_known_args(argv)
    doctor_flags = ["--json"] * options.json + (["--links", options.links] if options.links else [])
    args = parse(flags, environ)
    if args.script is not None:
        raise LaunchError(f"{OPERATION} doctor", f"it takes no script, and was given {args.script}.", "Leave it out.")
    args.script, args.script_args, args.module = "disttrain.doctor", doctor_flags, True
    if "nproc_per_node" not in args.given and num_gpus(environ):
        args.nproc_per_node = "gpu"
    return _start(args, environ, has_prefixes=False)


def _start(args: argparse.Namespace, environ: Mapping[str, str], *, has_prefixes: bool = True) -> int:
    args, note = placed(args, environ)
    for text in filter(None, (note, "" if args.quiet else misplaced(args))):
        print(f"{OPERATION}: {text}", file=sys.stderr, flush=True)
    spec = job_spec(args, environ)
    # Only now: the help must not wait for the store's and the event loop's modules.
    from disttrain_launch.launch import run

    return run(
        replace(spec, logs=replace(spec.logs, has_prefixes=has_prefixes, folds=spec.logs.folds and has_prefixes))
    )


def _submit(argv: Sequence[str]) -> int:
    from disttrain_launch.submit.command import submit  # only who submits needs it

    return submit(argv, settings.environment())


def _status(argv: Sequence[str]) -> int:
    from disttrain_launch.status import status  # only who asks needs it

    # An interrupt ends the watching, not the program at once.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return status(argv)


def _write_new_token(path: str) -> int:
    from disttrain.store import new_token, write_token  # as above

    if path == "-":
        print(new_token())
        return 0
    write_token(path)
    print(f"wrote {path}; copy it to every node of the job and give it as --token-file")
    return 0


_COMMANDS = {"run": _run, "submit": _submit, "doctor": _doctor, "status": _status}
