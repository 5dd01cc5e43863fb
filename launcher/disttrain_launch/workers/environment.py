"""Makes a worker's environment: the variables that torchrun gives, and the address of disttrain's store.

Names and meanings: torch's documentation of torchrun, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from disttrain import settings
from disttrain.store.protocol.wire import Address
from disttrain_launch.rendezvous.messages import Run
from disttrain_launch.request.job import JobSpec


@dataclass(frozen=True)
class Meeting:
    """The addresses at which this job's processes meet."""

    store_addr: str
    store_port: int
    token_file: Path | None
    torch_addr: str
    """For scripts on plain torch.distributed: rank 0 listens here, with torch's own store."""
    addresses: Callable[[], tuple[Address, Address | None]] | None = None
    """Where the store is by now, and its standby; None: it stays where it was."""
    server_fd: int | None = None
    """Readable when the store's server has ended, where workers alone use it: else those who use it notice."""
    proxy: Callable[[], Address | None] | None = None
    """Where workers find the store on their own node, as long as that passes on what they ask."""

    @property
    def endpoint(self) -> str:
        """Of the job's store, as it was at first: `host:port`."""
        return _endpoint(self.store_addr, self.store_port)

    @property
    def endpoints(self) -> str:
        """For workers: the store's `host:port`, and its standby's after a comma; or the proxy's."""
        if self.proxy is not None and (near := self.proxy()) is not None:
            return _endpoint(*near)
        address, standby = (self.store_addr, self.store_port), None
        if self.addresses is not None:
            address, standby = self.addresses()
        return ",".join(_endpoint(*pair) for pair in (address, standby) if pair is not None)


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def worker_environment(
    inherited: Mapping[str, str], spec: JobSpec, run: Run, meeting: Meeting, agent: str, local_rank: int
) -> dict[str, str]:
    """The whole environment of the worker with this `local_rank`."""
    assignment = run.assignment
    variables = {
        "RANK": assignment.first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": assignment.group_rank,
        "ROLE_RANK": assignment.first_rank + local_rank,
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_WORLD_SIZE": spec.num_local_workers,
        "GROUP_WORLD_SIZE": assignment.num_nodes,
        "ROLE_WORLD_SIZE": assignment.world_size,
        "MASTER_ADDR": run.torch_addr or meeting.torch_addr,
        "MASTER_PORT": run.torch_port,
        "TORCHELASTIC_RESTART_COUNT": run.num_restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.run_id,
        # The agent's store speaks disttrain's protocol; torch's own client could not talk to it.
        "TORCHELASTIC_USE_AGENT_STORE": False,
        settings.STORE.name: meeting.endpoints,
        settings.ROUND.name: assignment.round,
        settings.AGENT.name: agent,
    }
    environ = {**inherited, **{name: str(value) for name, value in variables.items()}}
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # Where a signal such as SIGSEGV ends a worker, Python's stack is all that tells where.
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if spec.num_local_workers > 1 and not settings.NUM_THREADS.is_set(inherited):
        environ[settings.NUM_THREADS.name] = str(spec.num_threads)
    environ.pop(settings.TOKEN_FILE.name, None)
    if meeting.token_file is not None:
        environ[settings.TOKEN_FILE.name] = str(meeting.token_file.absolute())
    # A worker may go to another directory before it opens them.
    for setting in (settings.STORE_TLS_CA, settings.STORE_TLS_CERT, settings.STORE_TLS_KEY):
        if (path := setting.read(inherited)) is not None:
            environ[setting.name] = str(path.absolute())
    return environ
