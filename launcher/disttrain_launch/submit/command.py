"""`disttrain-launch submit`: flags in; a script on a file or the screen, or a job on its way."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from disttrain.errors import LaunchError
from disttrain.store import new_token
from disttrain_launch.request.flags import Parser, add_flag, make_parser, parse
from disttrain_launch.request.job import OPERATION
from disttrain_launch.submit import kubernetes, slurm, ssh
from disttrain_launch.submit.fan_out import FanOut
from disttrain_launch.submit.request import chosen_variables, submission

SUBMIT = f"{OPERATION} submit"
_SEND_TIMEOUT_S = 120.0
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15"
_PYTHON_HELP = "the nodes' interpreter, which has disttrain; default: "
_USAGE = f"""\
usage: {SUBMIT} slurm|kubernetes|ssh [flags] script [script's arguments]

  slurm       write a batch script for sbatch, or send it with --now
  kubernetes  write a manifest for kubectl, or send it with --now
  ssh         start a launcher on each of --hosts, and stay with them to the end

{SUBMIT} slurm --help, and so on, lists the flags: those of {OPERATION} and the cluster's.
"""


def submit(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code. Raises LaunchError."""
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if not argv or argv[0] not in _CLUSTERS:
        problem = f"{argv[0]} is no cluster." if argv else "no cluster was named."
        raise LaunchError(SUBMIT, problem, "Give slurm, kubernetes or ssh; a script called submit is ./submit.")
    cluster, rest = argv[0], argv[1:]
    operation = f"{SUBMIT} {cluster}"
    parser = make_parser()
    parser.prog = operation
    parser.usage, parser.epilog = "%(prog)s [flags] script [script's arguments]", None
    add_flags, send = _CLUSTERS[cluster]
    add_flags(parser)
    return send(operation, parse(rest, environ, parser), environ)


def _add_slurm(parser: Parser) -> None:
    group = parser.add_argument_group("Slurm", "as sbatch takes them")
    _add_job(group, sys.executable)
    _add_writing(group)
    for flag in ("--time", "--partition", "--account"):
        add_flag(group, flag, metavar=flag[2:].upper())
    add_flag(group, "--output", metavar="FILE", help="what the job prints (Slurm's default: slurm-JOB.out)")
    add_flag(
        group, "--requeue", action="store_true", help="start it again when its time is up, or its nodes are taken away"
    )
    add_flag(
        group,
        "--save-time",
        type=int,
        metavar="S",
        help="tell workers S seconds before the time is up (SIGUSR1; with --requeue default: 120)",
    )
    add_flag(group, "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="any other line of sbatch's")


def _add_kubernetes(parser: Parser) -> None:
    group = parser.add_argument_group("Kubernetes")
    _add_job(group, "python")
    _add_writing(group)
    add_flag(group, "--image", metavar="IMAGE", help="container image with disttrain and the script")
    add_flag(group, "--namespace", metavar="NAME")
    add_flag(group, "--workdir", metavar="DIR", help="working directory in the container")
    _add_env(group)


def _add_ssh(parser: Parser) -> None:
    group = parser.add_argument_group("ssh")
    add_flag(group, "--hosts", metavar="A,B,C", help="where to start a launcher; the first is node 0")
    add_flag(group, "--host-file", metavar="FILE", help="the same, a host a line")
    add_flag(
        group,
        "--ssh",
        default=_SSH,
        metavar="COMMAND",
        help=f"what reaches a host (default: {_SSH})",
    )
    add_flag(group, "--python", default=sys.executable, metavar="FILE", help=_PYTHON_HELP + sys.executable)
    _add_env(group)
    parser.set_defaults(job_name=None)


def _add_job(group: argparse._ArgumentGroup, python: str) -> None:
    add_flag(group, "--job-name", metavar="NAME", help="default: the script's")
    add_flag(group, "--gpus-per-node", type=int, metavar="N")
    add_flag(group, "--cpus-per-task", type=int, metavar="N", help="cores of each node's launcher and its workers")
    add_flag(group, "--mem", metavar="SIZE", help="memory of each node")
    add_flag(group, "--python", default=python, metavar="FILE", help=_PYTHON_HELP + python)


def _add_writing(group: argparse._ArgumentGroup) -> None:
    add_flag(group, "--write", metavar="FILE", help="write it here (default: to the screen, unless it is sent)")
    add_flag(group, "--now", action="store_true", help="send it")


def _add_env(group: argparse._ArgumentGroup) -> None:
    help_text = "a variable for launchers and workers; NAME alone: as it is here"
    add_flag(group, "--env", action="append", default=[], metavar="NAME=VALUE", help=help_text)


def _slurm(operation: str, args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    job = submission(operation, args)
    if not (args.module or args.no_python or Path(args.script).exists()):
        raise LaunchError(operation, f"the script {args.script} does not exist.", f"This directory is {Path.cwd()}.")
    script = slurm.batch_script(job, args, Path.cwd())
    _write(operation, args, script)
    if args.now:
        print(_send(operation, ("sbatch",), script).rstrip("\n"))
    return 0


def _kubernetes(operation: str, args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    job = submission(operation, args)
    manifest = kubernetes.manifest(job, args, chosen_variables(operation, args.env, environ))
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    _write(operation, args, text)
    name = kubernetes.job_name(job)
    if not args.now:
        to = ["kubectl", "create", *(["-n", args.namespace] if args.namespace else [])]
        to += ["secret", "generic", kubernetes.secret_name(name), "--from-file=token=/dev/stdin"]
        print(f"{operation}: before, once: {OPERATION} --new-token - | {shlex.join(to)}", file=sys.stderr)
        return 0
    made = _send(operation, ("kubectl", "create", "-o", "json", "-f", "-"), text)
    owner = kubernetes.job_metadata(made)
    try:
        _send(operation, ("kubectl", "create", "-f", "-"), json.dumps(kubernetes.secret(name, new_token(), owner)))
    except LaunchError as error:
        raise LaunchError(operation, error.problem, f"Its pods wait for it: kubectl delete job {name}.") from None
    print(f"job {name} was created; see kubectl logs -f job/{name}")
    return 0


def _ssh(operation: str, args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    hosts = ssh.host_names(operation, args)
    job = submission(operation, args, num_nodes=len(hosts))
    if job.has_token:
        raise LaunchError(operation, "--token-file is not needed.", "Drop it: hosts get a token of this job's own.")
    orders = ssh.orders(
        job,
        args,
        hosts,
        token=new_token(),
        directory=Path.cwd(),
        variables=chosen_variables(operation, args.env, environ),
        python_path=environ.get("PYTHONPATH"),
    )
    num_spare = len(hosts) - job.least_nodes
    return FanOut(operation, orders, num_spare=num_spare, shutdown_timeout_s=args.shutdown_timeout).run()


def _write(operation: str, args: argparse.Namespace, text: str) -> None:
    if args.write is None:
        if not args.now:
            print(text, end="")
        return
    try:
        # Values of --env may be secrets.
        with open(args.write, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
    except OSError as error:
        raise LaunchError(operation, f"--write {args.write} cannot be written: {error.strerror}.") from None


def _send(operation: str, command: Sequence[str], text: str) -> str:
    """Give `text` to a program of the cluster's; returns what it prints. Raises LaunchError when it refuses."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", timeout=_SEND_TIMEOUT_S, check=False
        )
    except OSError as error:
        problem = f"{command[0]} cannot be run: {error.strerror}."
        raise LaunchError(operation, problem, "Go to where it is, or take the text without --now there.") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(operation, f"{command[0]} has not ended within {_SEND_TIMEOUT_S:g} s.") from None
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise LaunchError(operation, f"{command[0]} refused with exit code {done.returncode}: {said}")
    return done.stdout


_CLUSTERS: dict[
    str,
    tuple[Callable[[Parser], None], Callable[[str, argparse.Namespace, Mapping[str, str]], int]],
] = {
    "slurm": (_add_slurm, _slurm),
    "kubernetes": (_add_kubernetes, _kubernetes),
    "ssh": (_add_ssh, _ssh),
}
