"""A batch script for Slurm's sbatch.

Flags: Slurm's manual pages of sbatch and srun. In a #SBATCH line sbatch takes double quotes, and backslashes within.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from disttrain.errors import LaunchError
from disttrain.reports import REQUEUE_EXIT_CODE
from disttrain_launch.submit.request import Submission, one_line

_PLAIN = re.compile(r"[\w.,:/@%+=-]+", re.ASCII)
_WAIT_S = 60
"""The time that srun waits for the other launchers once one has ended; they end together, unless one was lost."""

_ABOUT_TOKEN = """\
# The job's token goes to every launcher through srun's standard input: it is no argument, no variable, no shared file.
"""


_REQUEUE = f"""\
# {REQUEUE_EXIT_CODE}: it was told to go, has saved, and is to be started again. But not what somebody has cancelled.
if [ "$status" = {REQUEUE_EXIT_CODE} ] && [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
_DEFAULT_SAVE_S = 120


def batch_script(job: Submission, args: argparse.Namespace, working_directory: Path) -> str:
    """The whole script, for sbatch. Raises LaunchError for what no line of it can hold."""
    directives = (f"#SBATCH {line}" for line in _directives(job, args, working_directory))
    flags = [] if job.has_token else ["--token-file=-"]
    if job.is_elastic:
        flags.append(f"--nnodes={job.nnodes}")
    save_s = _save_s(job, args)
    if save_s is not None and "shutdown_timeout" not in args.given:
        flags.append(f"--shutdown-timeout={save_s}")
    command = shlex.join((*_srun(job, args), *job.run_command(*flags)))
    if not job.has_token:
        command = f"{_ABOUT_TOKEN}{shlex.join(job.launcher)} --new-token - |\n    {command}"
    end = ""
    if args.requeue:
        command, end = f"status=0\n{command} || status=$?", _REQUEUE
    return "\n".join(["#!/bin/bash", *directives, "", "set -euo pipefail", command, end])


def _srun(job: Submission, args: argparse.Namespace) -> Iterator[str]:
    yield "srun"
    yield "--ntasks-per-node=1"
    if args.cpus_per_task is not None:
        yield f"--cpus-per-task={args.cpus_per_task}"  # Since Slurm 22.05 srun doesn't take it from the job.
    if job.is_elastic:
        yield from ("--no-kill", "--wait=0")
    else:
        yield f"--wait={_WAIT_S}"


def _directives(job: Submission, args: argparse.Namespace, working_directory: Path) -> Iterator[str]:
    def line(flag: str, value: object) -> str:
        return f"--{flag}={_quoted(one_line(job.operation, f'--{flag}', str(value)))}"

    yield line("job-name", job.name)
    yield line("nodes", job.nnodes.replace(":", "-"))
    yield "--ntasks-per-node=1"
    if job.is_elastic:
        yield "--no-kill"
    for flag in ("gpus-per-node", "cpus-per-task", "mem", "time", "partition", "account", "output"):
        if (value := getattr(args, flag.replace("-", "_"))) is not None:
            yield line(flag, value)
    yield line("chdir", working_directory)
    if args.requeue:
        yield "--requeue"
        yield "--open-mode=append"  # else each start would empty what the one before has printed
    if (save_s := _save_s(job, args)) is not None:
        # SIGTERM would end children of workers, too, such as those that load data.
        yield f"--signal=USR1@{save_s}"
    for choice in args.sbatch:
        key, equals, value = choice.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise LaunchError(job.operation, f"--sbatch {choice} is not KEY=VALUE.", "Give --sbatch qos=high.")
        yield line(key, value) if equals else f"--{key}"


def _save_s(job: Submission, args: argparse.Namespace) -> int | None:
    """The time before its end at which the job is told; None: it is not."""
    if args.save_time is None:
        return _DEFAULT_SAVE_S if args.requeue else None
    seconds = int(args.save_time)
    if not 0 < seconds <= 65535:
        raise LaunchError(job.operation, f"--save-time {seconds}: Slurm takes 1 to 65535 seconds.")
    return seconds


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
