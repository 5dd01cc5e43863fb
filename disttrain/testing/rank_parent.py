"""The process that a pool's workers are forked from: what they need is imported once, not once per rank.

It has one thread and has computed nothing, so that a fork of it is as good as a fresh interpreter. It is asked over a
socket, its standard input (`forks.Request`). When the pool has gone, it ends with all workers.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import traceback

import torch

from disttrain.testing import rank_worker
from disttrain.testing.forks import FRAME, Request


def main() -> None:
    pool = socket.socket(fileno=os.dup(0))
    torch.optim.SGD([torch.empty(0)])  # The first optimizer loads Dynamo, for two seconds.
    gc.collect()
    gc.freeze()  # What is loaded stays to the end: collections in workers need neither look at it nor copy its memory.
    workers: set[int] = set()
    try:
        while True:
            data, streams, _, _ = socket.recv_fds(pool, FRAME.size, 3)
            if not data:
                return
            request, number, worker = FRAME.unpack(data)
            if request == Request.FORK:
                worker = os.fork()
                if worker == 0:
                    pool.close()
                    _be_worker(streams)
                workers.add(worker)
                for stream in streams:
                    os.close(stream)
            elif worker in workers:  # unless who asked before was interrupted
                _end(worker)
                workers.remove(worker)
            pool.sendall(FRAME.pack(request, number, worker))
    except (ConnectionError, KeyboardInterrupt):
        return
    finally:
        for worker in workers:
            _end(worker)


def _be_worker(streams: list[int]) -> None:
    """Run until the pool wants no more; does not return."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    try:
        rank_worker.main()
    except BaseException:  # noqa: BLE001 -- as an interpreter would, but not up into the parent's frames
        traceback.print_exc()
    os._exit(1)


def _end(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


if __name__ == "__main__":
    main()
