"""The command line: torchrun's flag names in both spellings, and a few of our own.

A flag of torchrun that does nothing here yet is refused with what to do instead, never swallowed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from disttrain_launch.job import OPERATION

# torchrun's flags that have no effect here, and what to do instead.
_UNSUPPORTED = {
    "--start-method": "Workers are started by exec.",
    "--event-log-handler": "Use --log-dir.",
    "--run-path": "Give the script as it is.",
    "--duplicate-stdout-filters": "Filter the files under --log-dir.",
    "--duplicate-stderr-filters": "Filter the files under --log-dir.",
    "--local-addr": "Give --master-addr; other nodes' addresses are not needed.",
    "--logs-specs": "Use --log-dir, --redirects and --tee.",
    "--numa-binding": "Pin in the script, or start it with numactl and --no-python.",
    "--signals-to-handle": "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are always passed on.",
    "--virtual-local-rank": "Pick the GPU by LOCAL_RANK.",
}

_EPILOG = """\
one node:     disttrain-launch --nproc-per-node 2 train.py --steps 100
two nodes:    disttrain-launch --new-token job.token     (once; copy the file to all nodes, keep it secret)
              disttrain-launch --nnodes 2 --node-rank 0 --master-addr HOST0 --master-port 29500 \\
                  --token-file job.token --nproc-per-node 8 train.py
              and the same with --node-rank 1 on the other
2 to 4 nodes: --nnodes 2:4 --max-restarts 3, with --rdzv-endpoint HOST0:29500 in place of the --master flags; nodes may
              come and go, the script resumes from its checkpoint (docs/launching.md)
TLS:          set DISTTRAIN_STORE_TLS_CA on all nodes, DISTTRAIN_STORE_TLS_CERT and DISTTRAIN_STORE_TLS_KEY on node 0
exit code:    that of the first worker that failed, 128 + signal number where a signal ended it or the launcher;
              2 when the job was not started as asked
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text around it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{OPERATION}: {message} (see {OPERATION} --help)\n")


class _Unsupported(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        flag = self.option_strings[0]
        parser.error(f"torchrun's {flag} is not supported. {_UNSUPPORTED[flag]}")


def make_parser() -> Parser:
    parser = Parser(
        prog=OPERATION,
        description="Start a script as many processes on one node or several, and watch over them.",
        usage="%(prog)s [flags] script [script's arguments]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_size(parser)
    _add_meeting(parser)
    _add_script(parser)
    _add_logs(parser)
    _add_ending(parser)
    for flag in _UNSUPPORTED:
        _add(parser, flag, action=_Unsupported, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("script", nargs="?", help="script, module (-m) or program (--no-python) to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="passed on as they are")
    return parser


def _add(group: Any, *flags: str, **options: Any) -> None:
    """Add a flag, with torchrun's underscore spelling beside it."""
    both = [spelling for flag in flags for spelling in dict.fromkeys((flag, _underscored(flag)))]
    group.add_argument(*both, **options)


def _underscored(flag: str) -> str:
    return "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag


def _add_size(parser: Parser) -> None:
    group = parser.add_argument_group("how many")
    _add(group, "--nproc-per-node", default="1", metavar="N", help="workers on this node: a number, gpu, cpu or auto")
    _add(group, "--nnodes", default="1", metavar="N", help="nodes of the job, or MIN:MAX (default: 1)")
    _add(group, "--node-rank", type=int, metavar="K", help="which of them this is; 0 keeps the store")
    _add(group, "--oversubscribe", action="store_true", help="allow more workers than GPUs")


def _add_meeting(parser: Parser) -> None:
    group = parser.add_argument_group("where they meet")
    _add(group, "--standalone", action="store_true", help="one node, any free port (also the default for one node)")
    _add(group, "--master-addr", metavar="HOST", help="node 0 (default: 127.0.0.1)")
    _add(group, "--master-port", type=int, metavar="PORT", help="port of the store on node 0 (default: 29500)")
    _add(group, "--rdzv-endpoint", metavar="HOST:PORT", help="the two above in one")
    _add(group, "--rdzv-id", metavar="NAME", help="name of the job, the same on all nodes")
    _add(group, "--rdzv-backend", choices=("static", "c10d"), help="both mean disttrain's store")
    _add(group, "--token-file", metavar="FILE", help="the job's token, mode 0600; needed off loopback")
    _add(group, "--new-token", metavar="FILE", help="write a fresh token to FILE and exit")
    _add(group, "--join-timeout", type=float, metavar="S", help="seconds to wait for nodes (default: 300)")
    _add(
        group,
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="in seconds: join_timeout, last_call_timeout (30), close_timeout (3), keep_alive_interval (1); "
        "keep_alive_max_attempt (8)",
    )


def _add_script(parser: Parser) -> None:
    group = parser.add_argument_group("what to run")
    _add(group, "-m", "--module", action="store_true", help="script is a module, as in python -m")
    _add(group, "--no-python", action="store_true", help="script is a program of its own")
    _add(group, "--role", default="default", metavar="NAME", help="ROLE_NAME of the workers")


def _add_logs(parser: Parser) -> None:
    group = parser.add_argument_group("logs", "streams: 1 stdout, 2 stderr, 3 both; or by local rank: 0:3,1:2")
    _add(group, "--log-dir", metavar="DIR", help="also write DIR/rank-R/stdout.log and stderr.log")
    _add(group, "-r", "--redirects", default="0", metavar="STREAMS", help="these go to the files only")
    _add(group, "-t", "--tee", default="0", metavar="STREAMS", help="these go to files and screen")
    _add(group, "--local-ranks-filter", default="", metavar="0,1", help="only these workers' lines on the screen")


def _add_ending(parser: Parser) -> None:
    group = parser.add_argument_group("ending")
    _add(group, "--max-restarts", type=int, default=0, metavar="N", help="restarts after failures (default: 0)")
    _add(
        group,
        "--max-quick-failures",
        type=int,
        default=3,
        metavar="N",
        help="failures of one rank in a row, each within 10 s, that end the job anyway (default: 3; 0: none do)",
    )
    _add(group, "--monitor-interval", type=float, metavar="S", help="accepted for torchrun; exits are noticed at once")
    _add(
        group,
        "--stop-grace",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL when another worker failed (default: 2)",
    )
    _add(
        group,
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to SIGKILL after a signal to the launcher (default: 30)",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return make_parser().parse_args(argv)
