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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from disttrain.compiling import compile_blocks

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama.config import PRESETS
from llama.model import Llama

WAYS = ("blocks", "whole", "eager")


def make_model(way: str, options: argparse.Namespace) -> Llama:
    model = Llama(replace(PRESETS[options.preset], num_layers=options.layers))
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
    return {"first_s": step(model, options.seq, options), "other_length_s": step(model, options.seq // 2, options)}


def in_process(way: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--first-steps", way]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    parser.add_argument("--first-steps", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.first_steps:
        print(json.dumps(first_steps(options.first_steps, options)))
        return
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "sizes": {name: getattr(options, name) for name in ("preset", "layers", "batch", "seq", "threads")},
    }
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            results[way] = {"cold": in_process(way, cache), "warm": in_process(way, cache)}
    models = {way: make_model(way, options) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_number in range(options.rounds + 2):
        for way, model in models.items():
            taken_s = step(model, options.seq, options)
            if round_number >= 2:
                times[way].append(taken_s)
    print(f"{'':8}{'cold start':>12}{'warm start':>12}{'other length':>14}{'step':>12}{'eager over it':>15}")
    eager_s = statistics.median(times["eager"])
    for way in WAYS:
        results[way]["step_s"] = statistics.median(times[way])
        cold, warm, step_s = results[way]["cold"], results[way]["warm"], results[way]["step_s"]
        print(
            f"{way:8}{cold['first_s']:10.1f} s{warm['first_s']:10.1f} s{cold['other_length_s']:12.1f} s"
            f"{1e3 * step_s:9.1f} ms{eager_s / step_s:15.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
