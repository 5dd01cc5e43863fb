"""From parsed flags to a JobSpec: every check that needs no other node happens here, before anything is started."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disttrain import settings
from disttrain.devices import num_cores, num_gpus
from disttrain.errors import LaunchError
from disttrain_launch.request.addresses import LOOPBACK, is_loopback
from disttrain_launch.request.handed_token import STDIN
from disttrain_launch.request.job import OPERATION, UNNAMED, JobSpec, LogPlan, StreamChoice, parse_stream_choice

DEFAULT_PORT = 29500
MIN_MISSED_BEATS = 3
"""With fewer, a node that is merely busy for a moment would be lost."""


def job_spec(args: argparse.Namespace, environ: Mapping[str, str]) -> JobSpec:
    """The job that these arguments ask for. Raises LaunchError."""
    try:
        Path.cwd()
    except OSError as error:
        problem = f"the working directory cannot be used: {error.strerror}."
        raise LaunchError(OPERATION, problem, "Perhaps it was removed; go to another.") from None
    min_nodes, num_nodes = _num_nodes(args)
    node_rank = _node_rank(args, min_nodes, num_nodes)
    host, port = _master(args, num_nodes)
    token_file = _token_file(args)
    if num_nodes > 1 and token_file is None and not is_loopback(host):
        raise LaunchError(
            OPERATION,
            f"--master-addr {host} can be reached from the network, and the job has no token.",
            f"Make one with {OPERATION} --new-token FILE, copy it to all nodes, give it as --token-file FILE.",
        )
    run_id = args.rdzv_id or (UNNAMED if num_nodes > 1 else secrets.token_hex(8))
    num_local_workers = _num_local_workers(args.nproc_per_node, args.oversubscribe, environ)
    return JobSpec(
        command=_command(args),
        num_local_workers=num_local_workers,
        num_threads=max(1, num_cores() // num_local_workers),
        numa_binding=args.numa_binding,
        num_nodes=num_nodes,
        min_nodes=min_nodes,
        node_rank=node_rank,
        master_addr=host,
        master_port=port,
        run_id=run_id,
        role=args.role,
        token_file=token_file,
        logs=_log_plan(args, run_id),
        stop_grace_s=_seconds("--stop-grace", args.stop_grace),
        shutdown_timeout_s=_seconds("--shutdown-timeout", args.shutdown_timeout),
        has_standby=not args.no_standby,
        has_store_proxy=not args.no_store_proxy,
        max_restarts=_count("--max-restarts", args.max_restarts),
        max_quick_failures=_count("--max-quick-failures", args.max_quick_failures),
        may_differ=args.allow_different_commands,
        **_waits(args),
    )


def _num_nodes(args: argparse.Namespace) -> tuple[int, int]:
    """The fewest and the most."""
    text = args.nnodes
    least, colon, most = text.partition(":")
    if not colon:
        most = least
    if not all(re.fullmatch(r"\d+", end) and int(end) > 0 for end in (least, most)):
        raise LaunchError(OPERATION, f"--nnodes {text}: it must be a positive number, or two: 2:4.")
    if int(least) > int(most):
        raise LaunchError(OPERATION, f"--nnodes {text}: the first number is the larger.", f"Give {most}:{least}.")
    if args.standalone:
        conflicts = [
            flag
            for flag, is_given in (
                ("--nnodes", int(most) != 1),
                ("--node-rank", bool(args.node_rank)),
                ("--master-addr", args.master_addr is not None),
                ("--master-port", args.master_port is not None),
                ("--rdzv-endpoint", args.rdzv_endpoint is not None),
            )
            if is_given
        ]
        if conflicts:
            raise LaunchError(
                OPERATION,
                f"--standalone is for one node alone; it conflicts with {', '.join(conflicts)}.",
                "Drop either.",
            )
    return int(least), int(most)


def _node_rank(args: argparse.Namespace, min_nodes: int, num_nodes: int) -> int | None:
    is_elastic = min_nodes < num_nodes
    if args.node_rank is None:
        if num_nodes == 1:
            return 0
        if is_elastic or args.rdzv_endpoint is not None:
            return None
        raise LaunchError(
            OPERATION,
            f"--nnodes {num_nodes} needs --node-rank.",
            f"Give 0 to {num_nodes - 1}, each on one node; or --rdzv-endpoint, the same on all.",
        )
    node_rank = int(args.node_rank)
    # In an elastic job a number is a name: one that replaces another may have its own.
    if not node_rank >= 0 or (node_rank >= num_nodes and not is_elastic):
        raise LaunchError(
            OPERATION,
            f"--node-rank {node_rank} does not fit --nnodes {num_nodes}.",
            f"Nodes are numbered from 0 to {num_nodes - 1}.",
        )
    return node_rank


def _master(args: argparse.Namespace, num_nodes: int) -> tuple[str, int]:
    host, port = args.master_addr, args.master_port
    if args.rdzv_endpoint is not None:
        if host is not None or port is not None:
            raise LaunchError(
                OPERATION, "--rdzv-endpoint says the same as --master-addr and --master-port.", "Give one of them."
            )
        host, port = _endpoint(args.rdzv_endpoint)
    host = LOOPBACK if host is None else host.strip("[]")
    if not _may_be_host(host):
        raise LaunchError(OPERATION, f"--master-addr {host!r} is not a host.", "Give node 0's host name or address.")
    if port is None:
        port = DEFAULT_PORT if num_nodes > 1 else 0
    if not 0 <= port < 65536 or (port == 0 and num_nodes > 1):
        raise LaunchError(OPERATION, f"--master-port {port} is not a port.", "Give 1 to 65535, the same on all nodes.")
    return host, port


def _may_be_host(text: str) -> bool:
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def _endpoint(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(\d+))?", text)
    if match is None:
        raise LaunchError(OPERATION, f"--rdzv-endpoint {text} is not HOST:PORT.", "An IPv6 address needs brackets.")
    return match[1], None if match[2] is None else int(match[2])


def _token_file(args: argparse.Namespace) -> Path | None:
    path = Path(args.token_file) if args.token_file is not None else settings.TOKEN_FILE.read()
    if path is not None and path != STDIN and not path.is_file():
        raise LaunchError(
            OPERATION,
            f"the token file {path} does not exist.",
            f"Make one with {OPERATION} --new-token FILE and copy it to all nodes.",
        )
    return path


def _num_local_workers(text: str, may_oversubscribe: bool, environ: Mapping[str, str]) -> int:
    gpus = num_gpus(environ)
    if text == "gpu" and gpus == 0:
        raise LaunchError(OPERATION, "--nproc-per-node gpu: this node has no visible GPU.", "Give a number, or cpu.")
    named = {"gpu": gpus, "cpu": num_cores(), "auto": gpus or num_cores()}
    if text in named:
        return named[text]
    if not re.fullmatch(r"\d+", text) or int(text) == 0:
        raise LaunchError(
            OPERATION, f"--nproc-per-node {text} starts nothing.", "Give a positive number, or gpu, cpu or auto."
        )
    if int(text) > gpus > 0 and not may_oversubscribe:
        raise LaunchError(
            OPERATION,
            f"--nproc-per-node {text} is more than the {gpus} visible GPU{'s' if gpus > 1 else ''} of this node.",
            "Give fewer, or --oversubscribe when workers shall share GPUs or use none.",
        )
    return int(text)


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    if args.script is None:
        raise LaunchError(OPERATION, "no script was given.", f"See {OPERATION} --help.")
    if args.no_python and args.module:
        raise LaunchError(OPERATION, "--module and --no-python conflict.", "A module needs python.")
    if args.no_python:
        if shutil.which(args.script) is None:
            raise LaunchError(OPERATION, f"{args.script} is not a program that can be run.", "Check path and mode.")
        return (args.script, *args.script_args)
    # -u: lines reach the screen when they are printed, although a pipe is in between.
    if args.module:
        _check_module(args.script)
        return (sys.executable, "-u", "-m", args.script, *args.script_args)
    script = Path(args.script)
    # A folder or archive with a __main__ is a script too, as for python itself.
    if not script.exists():
        raise LaunchError(OPERATION, f"the script {script} does not exist.", f"The working directory is {Path.cwd()}.")
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise LaunchError(OPERATION, f"the script {script} is a folder without a __main__.py.", "Name a file in it.")
    if not os.access(script, os.R_OK):
        raise LaunchError(OPERATION, f"the script {script} cannot be read.", "Check its mode.")
    return (sys.executable, "-u", args.script, *args.script_args)


def _check_module(module: str) -> None:
    """Only the top package is looked up: to find a submodule, its parent would have to be imported."""
    top = module.partition(".")[0]
    if top.isidentifier():
        in_working_directory = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
        if in_working_directory is not None or importlib.util.find_spec(top) is not None:
            return
    raise LaunchError(OPERATION, f"there is no module {module}.", "Check the name, the working directory, PYTHONPATH.")


def _log_plan(args: argparse.Namespace, run_id: str) -> LogPlan:
    only_file = _stream_choice("--redirects", args.redirects)
    file_and_screen = _stream_choice("--tee", args.tee)
    directory = None if args.log_dir is None else Path(args.log_dir).absolute()
    if directory is None and not (only_file.is_empty and file_and_screen.is_empty):
        directory = Path(tempfile.mkdtemp(prefix=f"disttrain-logs-{_file_name(run_id)}-"))
        print(f"{OPERATION}: logs are in {directory}", file=sys.stderr)
    if directory is not None:
        _check_writable(directory)
    event_file = None if directory is None else directory / "events.jsonl"
    return LogPlan(
        directory,
        only_file,
        file_and_screen,
        _local_ranks(args.local_ranks_filter),
        folds=not args.no_fold,
        event_file=event_file if args.event_log is None else Path(args.event_log).absolute(),
        is_quiet=args.quiet,
        is_verbose=args.verbose,
    )


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)[:64]


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise LaunchError(
            OPERATION, f"--log-dir {directory} cannot be written: {error.strerror}.", "Name another folder."
        ) from None


def _stream_choice(flag: str, text: str) -> StreamChoice:
    try:
        return parse_stream_choice(text)
    except ValueError:
        raise LaunchError(
            OPERATION, f"{flag} {text} is not a choice of streams.", "Give 0 to 3, or local rank and stream: 0:3,1:2."
        ) from None


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise LaunchError(OPERATION, f"--local-ranks-filter {text} is not a list of local ranks.", "Give 0,1,2.")
    return frozenset(int(item) for item in text.split(","))


def _count(flag: str, value: int) -> int:
    if value < 0:
        raise LaunchError(OPERATION, f"{flag} {value} is not a number of times.", "Give 0 or more.")
    return value


# Names that torchrun has in --rdzv-conf too, and what they set.
_WAITS = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "close_timeout": "close_s",
    "keep_alive_interval": "beat_s",
    "keep_alive_max_attempt": "max_missed_beats",
}


_OF_TORCHS_STORE = {"read_timeout", "store_type", "use_libuv"}
"""Settings of torchrun's own store, which ours does not use."""


def _waits(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of JobSpec that --rdzv-conf and --join-timeout set."""
    fields: dict[str, Any] = {}
    for item in filter(None, args.rdzv_conf.split(",")):
        name, _, text = item.partition("=")
        if name in _OF_TORCHS_STORE:
            continue
        if name not in _WAITS:
            problem = f"--rdzv-conf {item} is not known."
            raise LaunchError(OPERATION, problem, f"It knows {', '.join(_WAITS)}.")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fields[_WAITS[name]] = _seconds(f"--rdzv-conf {name}", value)
    if args.join_timeout is not None:
        fields["join_timeout_s"] = _seconds("--join-timeout", args.join_timeout)
    if fields.get("beat_s", 1) <= 0:
        raise LaunchError(OPERATION, "--rdzv-conf keep_alive_interval must be more than 0.")
    if (num_beats := fields.get("max_missed_beats")) is not None:
        if num_beats < MIN_MISSED_BEATS or num_beats != int(num_beats):
            problem = f"--rdzv-conf keep_alive_max_attempt={num_beats:g} is not a number of beats that may be missed."
            raise LaunchError(OPERATION, problem, f"Give a whole number, {MIN_MISSED_BEATS} or more.")
        fields["max_missed_beats"] = int(num_beats)
    return fields


def _seconds(flag: str, value_s: float) -> float:
    if not (value_s >= 0 and math.isfinite(value_s)):
        raise LaunchError(OPERATION, f"{flag} {value_s:g} is not a time.", "Give seconds, 0 or more.")
    return value_s
