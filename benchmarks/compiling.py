"""What compiling a Llama costs and brings on this machine's CPU: by blocks, as a whole, and not at all.

    python benchmarks/compiling.py [--preset small] [--layers 8] [--json FILE]

Each way runs in processes of its own, over caches that are empty ("cold") and then full ("warm"): the time to the end
of the first step, and of the first one of another length. Steps (forward, loss, backward) of all ways are then taken
in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import Row, command_line, finish, in_turns, row, spread

from disttrain.compiling import compile_blocks

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama.config import PRESETS
from llama.model import Llama

WAYS = ("blocks", "whole", "eager")
SIZES = ("preset", "layers", "batch", "seq", "threads")


def make_model(way: str, options: argparse.Namespace) -> Llama:
    model = Llama(replace(PRESETS[options.preset], num_layers=options.layers, max_length=options.seq))
    model.init(seed=0)
    if way == "blocks":
        compile_blocks(model)
    elif way == "whole":
        model.compile(fullgraph=True)
    return model


def step(model: Llama, length: int, options: argparse.Namespace) -> float:
    """Seconds of a forward and backward."""
    tokens = torch.arange(options.batch * (length + 1)).reshape(options.batch, -1) % 251
    begin = time.perf_counter()
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return time.perf_counter() - begin


def first_steps(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first step of a process, and of the first one of another length."""
    model = make_model(way, options)
    return {
        "first step": step(model, options.seq, options),
        "first step of another length": step(model, options.seq // 2, options),
    }


def in_process(way: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--first-steps", way]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--first-steps", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.first_steps:
        print(json.dumps(first_steps(options.first_steps, options)))
        return
    starts: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            for start in ("empty caches", "full caches"):
                for what, seconds in in_process(way, cache).items():
                    starts.setdefault(f"{what}, {start}", {})[way] = [seconds]
    models = {way: make_model(way, options) for way in WAYS}
    steps = {way: partial(step, model, options.seq, options) for way, model in models.items()}
    taken = in_turns(steps, options.rounds, 2)
    eager_s = statistics.median(taken["eager"])
    faster = {way: [eager_s / each for each in times] for way, times in taken.items() if way != "eager"}
    rows = [row(case, "s", times) for case, times in starts.items()]
    rows += [
        row("a step", "ms", taken, 1e3),
        Row("eager over it", "ratio", {way: spread(of) for way, of in faster.items()}, True),
    ]
    finish(rows, options.json, sizes={name: getattr(options, name) for name in SIZES})


if __name__ == "__main__":
    main()
