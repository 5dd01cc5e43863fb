"""The process of one rank in a `RankPool`: reads tasks from its standard input, runs them as that rank, answers.

Whatever a task prints goes to the worker's log, so that standard output carries answers alone.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import disttrain
from disttrain.process_group.calls.packing import pack
from disttrain.settings import set_for_libraries
from disttrain.store import PrefixStore, TCPStore
from disttrain.testing.frames import read_frame, write_frame


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    try:
        write_frame(answers, {"kind": "Ready"})
        while True:
            task = read_frame(sys.stdin.buffer)
            write_frame(answers, _run(task, modules))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The pool has gone. A transport's thread may still wait for a peer: leave without asking it.
        os._exit(0)


def _run(task: dict[str, Any], modules: dict[str, ModuleType]) -> dict[str, Any]:
    store = TCPStore(task["host"], task["port"], timeout=timedelta(seconds=task["timeout_s"]), wait_for_workers=False)
    try:
        if torch.cuda.is_available():
            _take_gpu(task["rank"])
        disttrain.init_process_group(
            backend=task["backend"],
            store=PrefixStore(task["job"], store),
            rank=task["rank"],
            world_size=task["world_size"],
            timeout=task["timeout_s"],
        )
        torch.manual_seed(0)
        value = _find(task, modules)(**task["arguments"])
        answer = {"value": value}
        pack(answer)
    except BaseException as error:  # noqa: BLE001 -- it is the answer
        answer = {"error": traceback.format_exc(), "kind": type(error).__name__}
    finally:
        if disttrain.is_initialized():
            disttrain.destroy_process_group()
        store.close()
    return answer


def _take_gpu(rank: int) -> None:
    """Each rank its own, as far as there are enough; further ranks share them."""
    round_of_gpus, gpu = divmod(rank, torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    if round_of_gpus:
        # NCCL refuses two ranks of one GPU, unless it takes them for ranks of two hosts.
        set_for_libraries("NCCL_HOSTID", f"host-{round_of_gpus}")


def _find(task: dict[str, Any], modules: dict[str, ModuleType]) -> Callable[..., Any]:
    path = task["file"]
    if path not in modules:
        name = f"rank_tasks_{len(modules)}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    target: Any = modules[path]
    for part in task["function"].split("."):
        target = getattr(target, part)
    return getattr(target, "on_rank", target)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
