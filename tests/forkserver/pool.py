"""A pool of ranks whose parents, the interpreters that ranks are forked from, are forked themselves."""

from __future__ import annotations

import itertools
import socket
import subprocess
from collections.abc import Mapping, Sequence

from disttrain.testing import RankPool
from disttrain.testing.forks import RankParent, RankParents
from tests.forkserver.process import ForkedProcess, ForkServer


class _ForkedParent(RankParent):
    def __init__(self, address: str) -> None:
        self._server = ForkServer(address)
        super().__init__()

    def close(self) -> None:
        super().close()
        self._server.close()

    def _start(self, requests: socket.socket, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        arguments = ("-m", "disttrain.testing.rank_parent")
        return ForkedProcess(self._server, arguments, env=variables, stdin=requests, stdout=self.log, stderr=self.log)


def forked_pool(addresses: Sequence[str]) -> RankPool:
    """A pool whose parents come from each of these servers in turn: two differ in their hash seeds, as they must."""
    turns = itertools.cycle(addresses)
    pool = RankPool()
    pool._parents = RankParents(lambda: _ForkedParent(next(turns)))
    return pool
