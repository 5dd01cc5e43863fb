"""The command line: torchrun's flag names in both spellings, and a few of our own.

A flag of torchrun that does nothing here yet is refused with what to do instead, never swallowed. What the command line
doesn't say, variables may: `DISTTRAIN_LAUNCH_NNODES`, then torchrun's `PET_NNODES`, are `--nnodes`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from disttrain import command_line, settings
from disttrain.command_line import explained
from disttrain_launch.request.job import OPERATION
from disttrain_launch.workers.binding import AUTO, NONE, Way

VARIABLE_PREFIXES = ("PET_", "DISTTRAIN_LAUNCH_")
"""The later wins."""

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_ABSENT = object()
_NO_FLAGS = {"script", "script_args", "new_token"}
"""Only the command line has these."""

# What says the same, or excludes it: where one source gives the flag, a weaker source's others are not looked at.
_RIVALS = {
    "rdzv_endpoint": {"master_addr", "master_port", "standalone"},
    "master_addr": {"rdzv_endpoint", "standalone"},
    "master_port": {"rdzv_endpoint", "standalone"},
    "nnodes": {"standalone"},
    "node_rank": {"standalone"},
    "standalone": {"rdzv_endpoint", "master_addr", "master_port", "nnodes", "node_rank"},
    "module": {"no_python"},
    "no_python": {"module"},
}

_LAUNCHERS_ALONE = ("--nproc-per-node", "--nnodes", "--standalone", "--max-restarts", "--rdzv-endpoint")
"""Flags of which a script hardly has its own."""

# torchrun's flags that have no effect here, and what to do instead. Those that ask for what is done anyhow are taken.
_UNSUPPORTED = {
    "--start-method": "Workers are started by exec.",
    "--event-log-handler": "Use --event-log.",
    "--run-path": "Give the script as it is.",
    "--duplicate-stdout-filters": "Filter the files under --log-dir.",
    "--duplicate-stderr-filters": "Filter the files under --log-dir.",
    "--local-addr": "Give --master-addr; other nodes' addresses are not needed.",
    "--logs-specs": "Use --log-dir, --redirects and --tee.",
    "--signals-to-handle": "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are always passed on.",
    "--virtual-local-rank": "Pick the GPU by LOCAL_RANK.",
}

_DONE_ANYHOW = {
    "--start-method": {"spawn", "fork", "forkserver"},  # torchrun, too, starts scripts by exec
    "--event-log-handler": {"null"},
    "--logs-specs": {"default"},
    "--signals-to-handle": {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"},
}

_EPILOG = """\
one node:     disttrain-launch --nproc-per-node 2 train.py --steps 100
two nodes:    disttrain-launch --new-token job.token     (once; copy the file to all nodes, keep it secret)
              disttrain-launch --nnodes 2 --node-rank 0 --master-addr HOST0 --master-port 29500 \\
                  --token-file job.token --nproc-per-node 8 train.py
              and the same with --node-rank 1 on the other
2 to 4 nodes: --nnodes 2:4 --max-restarts 3, with --rdzv-endpoint HOST0:29500 in place of the --master flags; nodes may
              come and go, the script resumes from its checkpoint (docs/launching.md)
Slurm:        disttrain-launch submit slurm --now --nnodes 2 --nproc-per-node 8 train.py; or srun disttrain-launch ...
              Also by Kubernetes, MPI and ssh, without flags about nodes: docs/clusters.md
variables:    DISTTRAIN_LAUNCH_NNODES=2, or torchrun's PET_NNODES=2, is --nnodes 2; so for every flag, 1 for a switch
TLS:          set DISTTRAIN_STORE_TLS_CA on all nodes, DISTTRAIN_STORE_TLS_CERT and DISTTRAIN_STORE_TLS_KEY on node 0
exit code:    that of the first worker that failed, 128 + signal number where a signal ended it or the launcher;
              2 when the job was not started as asked; 75 when it was told to go and has saved: start it again
"""


class Parser(command_line.Parser):
    """Names the variable that a mistake stands in."""

    source = ""
    """The variable that is being read; empty: the command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{OPERATION}: {self.source}{explained(self, message)} See {self.prog} --help.\n")


class _Unsupported(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        flag = self.option_strings[0]
        if values and set(values.split(",")) <= _DONE_ANYHOW.get(flag, set()):
            return
        parser.error(f"torchrun's {flag} is not supported. {_UNSUPPORTED[flag]}")


def make_parser() -> Parser:
    parser = Parser(
        prog=OPERATION,
        description="Start a script as many processes on one node or several, and watch over them.",
        usage="%(prog)s [run] [flags] script [script's arguments]\n"
        "       %(prog)s submit slurm|kubernetes|ssh [flags] script [script's arguments]\n"
        "       %(prog)s doctor [--json] [--links FILE] [flags]\n"
        "       %(prog)s status [--endpoint HOST:PORT --token-file FILE] [--watch] [--json]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_size(parser)
    _add_meeting(parser)
    _add_script(parser)
    _add_logs(parser)
    _add_ending(parser)
    for flag in _UNSUPPORTED:
        add_flag(parser, flag, action=_Unsupported, nargs="?", help=argparse.SUPPRESS)
    command_line.add_version(parser)
    parser.add_argument("script", nargs="?", help="script, module (-m) or program (--no-python) to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="passed on as they are")
    return parser


def add_flag(group: Any, *flags: str, **options: Any) -> None:
    """Add a flag, with torchrun's underscore spelling beside it."""
    both = [spelling for flag in flags for spelling in dict.fromkeys((flag, _underscored(flag)))]
    group.add_argument(*both, **options)


def _underscored(flag: str) -> str:
    return "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag


def _add_size(parser: Parser) -> None:
    group = parser.add_argument_group("how many")
    add_flag(
        group, "--nproc-per-node", default="1", metavar="N", help="workers on this node: a number, gpu, cpu or auto"
    )
    add_flag(group, "--nnodes", default="1", metavar="N", help="nodes of the job, or MIN:MAX (default: 1)")
    add_flag(group, "--node-rank", type=int, metavar="K", help="which of them this is; 0 keeps the store")
    add_flag(group, "--oversubscribe", action="store_true", help="allow more workers than GPUs")
    add_flag(
        group,
        "--numa-binding",
        default=AUTO,
        choices=(AUTO, NONE, *(way.value for way in Way)),
        metavar="WAY",
        help="cores of each worker: of its GPU's NUMA node or socket, exclusive, core-complex, none "
        "(default: auto, which is node where there are GPUs and several nodes)",
    )


def _add_meeting(parser: Parser) -> None:
    group = parser.add_argument_group("where they meet")
    add_flag(group, "--standalone", action="store_true", help="one node, any free port (also the default for one node)")
    add_flag(group, "--master-addr", metavar="HOST", help="node 0 (default: 127.0.0.1)")
    add_flag(group, "--master-port", type=int, metavar="PORT", help="port of the store on node 0 (default: 29500)")
    add_flag(group, "--rdzv-endpoint", metavar="HOST:PORT", help="the two above in one")
    add_flag(group, "--rdzv-id", metavar="NAME", help="name of the job, the same on all nodes")
    add_flag(group, "--rdzv-backend", choices=("static", "c10d"), help="both mean disttrain's store")
    add_flag(
        group,
        "--token-file",
        metavar="FILE",
        help="the job's token, mode 0600, or - for standard input; needed off loopback",
    )
    add_flag(
        group, "--new-token", metavar="FILE", help="write a fresh token to FILE, or - for standard output, and exit"
    )
    add_flag(group, "--join-timeout", type=float, metavar="S", help="seconds to wait for nodes (default: 300)")
    add_flag(
        group,
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="in seconds: join_timeout, last_call_timeout (30), close_timeout (3), keep_alive_interval (1); "
        "keep_alive_max_attempt (8)",
    )


def _add_script(parser: Parser) -> None:
    group = parser.add_argument_group("what to run")
    add_flag(group, "-m", "--module", action="store_true", help="script is a module, as in python -m")
    add_flag(group, "--no-python", action="store_true", help="script is a program of its own")
    add_flag(group, "--role", default="default", metavar="NAME", help="ROLE_NAME of the workers")
    add_flag(
        group,
        "--allow-different-commands",
        action="store_true",
        help="nodes may run different scripts or arguments; give it on all of them",
    )


def _add_logs(parser: Parser) -> None:
    group = parser.add_argument_group("logs", "streams: 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2")
    add_flag(group, "--log-dir", metavar="DIR", help="also write DIR/rank-R/stdout.log and stderr.log")
    add_flag(group, "-r", "--redirects", default="0", metavar="STREAMS", help="these go to the files only")
    add_flag(group, "-t", "--tee", default="0", metavar="STREAMS", help="these go to files and screen")
    add_flag(group, "--local-ranks-filter", default="", metavar="0,1", help="only these workers' lines on the screen")
    add_flag(group, "--no-fold", action="store_true", help="show equal lines of several ranks one by one")
    add_flag(group, "-q", "--quiet", action="store_true", help="no table; of the launcher itself only why a job failed")
    add_flag(
        group,
        "-v",
        "--verbose",
        action="store_true",
        help="when a job fails, show what all ranks say of it, and C++ stacks",
    )
    add_flag(
        group,
        "--event-log",
        metavar="FILE",
        help="node 0 writes what happens there, JSON line by line (default: events.jsonl in --log-dir)",
    )


def _add_ending(parser: Parser) -> None:
    group = parser.add_argument_group("ending")
    add_flag(
        group,
        "--no-standby",
        action="store_true",
        help="with --nnodes 2:4: the job ends with node 0, which has its store",
    )
    add_flag(
        group,
        "--no-store-proxy",
        action="store_true",
        help="each worker connects to the store itself, not by its node's one connection",
    )
    add_flag(group, "--max-restarts", type=int, default=0, metavar="N", help="restarts after failures (default: 0)")
    add_flag(
        group,
        "--max-quick-failures",
        type=int,
        default=3,
        metavar="N",
        help="failures of one rank in a row, each within 10 s, that end the job anyway (default: 3; 0: never)",
    )
    add_flag(
        group, "--monitor-interval", type=float, metavar="S", help="accepted for torchrun; exits are noticed at once"
    )
    add_flag(
        group,
        "--stop-grace",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL when another worker failed (default: 2)",
    )
    add_flag(
        group,
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to SIGKILL after a signal to the launcher (default: 30)",
    )


def parse(
    argv: Sequence[str] | None, environ: Mapping[str, str] = _NO_VARIABLES, parser: Parser | None = None
) -> argparse.Namespace:
    """All flags, from the command line, else from variables, else their defaults; `given` names those of the first two.

    Exits with one line when a flag or variable is wrong. A launcher inside a worker reads no variables: they were for
    the launcher that started the worker.
    """
    parser = parser or make_parser()
    defaults = {**vars(parser.parse_args([])), "script": None, "script_args": []}
    # A list is what its flag adds to: empty says that it was not given.
    parser.set_defaults(**{name: _ABSENT for name, default in defaults.items() if not isinstance(default, list)})
    on_line = _given(parser, argv)
    chosen: dict[str, Any] = {}
    if not settings.AGENT.is_set(environ):
        for prefix in VARIABLE_PREFIXES:
            chosen = _over(_from_variables(parser, defaults, prefix, environ), chosen)
    chosen = _over(on_line, chosen)
    return argparse.Namespace(**{**defaults, **chosen}, given=frozenset(chosen))


def misplaced(args: argparse.Namespace) -> str:
    """What to say of the launcher's flags behind the script's name, which nobody has given in front; empty if nothing.

    They are the script's, as torchrun has it, and stay so.
    """
    if args.no_python or args.module:
        return ""  # such as another launcher
    words = {word.partition("=")[0] for word in args.script_args}
    flags = [
        flag
        for flag in _LAUNCHERS_ALONE
        if {flag, _underscored(flag)} & words and flag[2:].replace("-", "_") not in args.given
    ]
    if not flags:
        return ""
    stand, them = ("stands", "it") if len(flags) == 1 else ("stand", "them")
    return (
        f"{', '.join(flags)} {stand} behind {args.script}, which gets {them}; the launcher's flags go in front of it."
    )


def _given(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    return {
        name: value for name, value in vars(parser.parse_args(argv)).items() if value is not _ABSENT and value != []
    }


def _from_variables(
    parser: Parser, defaults: Mapping[str, Any], prefix: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name in defaults:
        variable = prefix + name.upper()
        if name not in _NO_FLAGS and (text := environ.get(variable)):
            parser.source = f"{variable}={text}: "
            chosen[name] = _value(parser, name, text, is_switch=defaults[name] is False)
    parser.source = ""
    # Kubeflow gives both; the endpoint is the one that its users chose.
    return _over({"rdzv_endpoint": chosen["rdzv_endpoint"]}, chosen) if "rdzv_endpoint" in chosen else chosen


def _value(parser: Parser, name: str, text: str, *, is_switch: bool) -> Any:
    if not is_switch:
        return _given(parser, [f"--{name.replace('_', '-')}={text}"])[name]
    if text not in {"0", "1"}:
        parser.error("it must be 0 or 1.")
    return text == "1"


def _over(strong: Mapping[str, Any], weak: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {rival for name in strong for rival in _RIVALS.get(name, ())}
    return {**{name: value for name, value in weak.items() if name not in hidden}, **strong}
