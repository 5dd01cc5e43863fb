"""Scripts as a person runs them: by the launcher, on this machine, with no variable of ours set before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FORK_CLIENT = ROOT / "tests" / "forkserver" / "client.py"
LIMIT_S = 360.0
"""Below a test's own limit, so that what has been printed is shown."""


def environment(*, has_gpus: bool = False) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISTTRAIN_", "OMP_"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    hidden = {} if has_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **hidden, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def launcher(server: ForkServer | None = None) -> list[str]:
    """The launcher's command; `server` forks its workers."""
    return launcher_at(None if server is None else server.address)


def launcher_at(address: str | None) -> list[str]:
    """The same, by the address of a fork server."""
    return [sys.executable, *launcher_arguments(address)]


def launcher_arguments(address: str | None) -> list[str]:
    """What Python gets to be the launcher."""
    return (
        ["-m", "disttrain_launch"] if address is None else [str(ROOT / "tests" / "forkserver" / "launch.py"), address]
    )


def command(num_ranks: int, *argv: str | Path, server: ForkServer | None = None) -> list[str]:
    """The launcher's flags, if there are any, go before the script in `argv`."""
    return [*launcher(server), "--standalone", "--nproc-per-node", str(num_ranks), *map(str, argv)]


def launched(
    num_ranks: int,
    *argv: str | Path,
    folder: Path | None = None,
    check: bool = True,
    has_gpus: bool = False,
    server: ForkServer | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it in `folder` to its end. Raises: CalledProcessError when it fails and `check` is set."""
    return subprocess.run(
        command(num_ranks, *argv, server=server),
        cwd=folder,
        env=environment(has_gpus=has_gpus),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=check,
    )
