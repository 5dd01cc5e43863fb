"""`disttrain.launch`: starts ranks as forks of this process, shows what they print, returns what they return.

Why forks: a function of a cell has no file that another Python could import, and what it refers to (other cells'
functions, data, a model) could be carried over by a pickle alone. A fork has it all. The price is torch's rule that a
process whose GPUs were used cannot be forked: then launch refuses before anything is started.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from disttrain import settings
from disttrain.devices import num_cores, num_gpus
from disttrain.errors import LaunchError
from disttrain.notebook.forked import Failure, Ranks
from disttrain.notebook.rank import GPUS_REMEDY, GPUS_USED, OPERATION, Task
from disttrain.process_group import is_initialized
from disttrain.store import TCPStore

_HOST = "127.0.0.1"


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc: int | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `nproc` ranks of this machine, and returns what each returned, by rank.

    Each rank is a fork of this process, with a launcher's environment variables: `init_process_group()` in the function
    makes it a rank of the job, as in a script. What ranks print is shown here with their numbers before it. Values
    travel as Python's plain ones, tensors (to the CPU) and arrays. An interrupt ends all ranks.

    Args:    function  of a cell or of a module; also a lambda, or a method;
             nproc  None: a rank for each GPU, and one where there is none.
    Raises:  LaunchError, before anything starts, in a process that is a rank already, or has used its GPUs, which no
             fork can use then; LaunchError with the traceback of the rank that failed first, when the others are ended.
    """
    size = _checked(function, args, nproc)
    with closing(TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)) as store:
        shared = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": _free_port(),
            "TORCHELASTIC_USE_AGENT_STORE": False,
            settings.STORE.name: f"{_HOST}:{store.port}",
            settings.ROUND.name: 0,
            settings.REPORT_FILE.name: "",
        }
        num_threads = None if settings.NUM_THREADS.is_set() else max(1, num_cores() // size)
        tasks = [
            Task(
                function,
                args,
                kwargs or {},
                {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()},
                num_threads,
            )
            for rank in range(size)
        ]
        try:
            answer = Ranks(tasks).run()
        except OSError as error:
            problem = f"{size} forks of this process cannot be made: {error.strerror}."
            raise LaunchError(OPERATION, problem, "Launch fewer ranks, or free memory.") from None
    if isinstance(answer, Failure):
        name = getattr(function, "__qualname__", repr(function))
        failure = LaunchError(OPERATION, f"{name} failed on rank {answer.rank} of {size}.\n\n{answer.told}")
        failure.rank = answer.rank
        raise failure
    return answer


def _checked(function: object, args: object, nproc: object) -> int:
    """The number of ranks. Raises: LaunchError."""
    if not callable(function):
        raise LaunchError(OPERATION, f"{function!r} is no function.", "Give the function, and its arguments as args.")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise LaunchError(OPERATION, f"args is {args!r}, no tuple of arguments.", f"Give args=({args!r},).")
    size = max(1, num_gpus(settings.environment())) if nproc is None else nproc
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise LaunchError(OPERATION, f"nproc is {nproc!r}.", "Give the number of ranks, from 1 on.")
    if is_initialized():
        problem = "this process is a rank already, and forks would share its connections."
        raise LaunchError(OPERATION, problem, "Call disttrain.destroy_process_group() first.")
    if torch.cuda.is_initialized():
        raise LaunchError(OPERATION, GPUS_USED, GPUS_REMEDY)
    return size


def _free_port() -> int:
    """For functions on plain torch.distributed, whose rank 0 listens there."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
