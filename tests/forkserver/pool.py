"""The interpreters that ranks of tests are forked from, forked from warm Pythons (`warm_python`) themselves."""

from __future__ import annotations

import itertools
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import cast

from disttrain.testing import RankPool
from disttrain.testing.forks import RankParent, RankParents
from tests.forkserver.server import Script, WarmPython


class _WarmParent(RankParent):
    def __init__(self, address: str) -> None:
        self._python = WarmPython(address)
        super().__init__()

    def close(self) -> None:
        super().close()
        self._python.close()

    def _start(self, requests: socket.socket, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        streams = (requests.fileno(), self.log.fileno(), self.log.fileno())
        pid = self._python.fork(("-m", "disttrain.testing.rank_parent"), variables, streams)
        return cast("subprocess.Popen[bytes]", Script(self._python, pid))  # which has what is needed of it


def warm_pool(addresses: Sequence[str]) -> RankPool:
    """A pool whose interpreters come from each of these in turn: two differ in their hash seeds, as they must."""
    turns = itertools.cycle(addresses)
    pool = RankPool()
    pool._parents = RankParents(lambda: _WarmParent(next(turns)))
    return pool
