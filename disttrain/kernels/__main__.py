"""`python -m disttrain.kernels bench`: how fast the kernels are on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from disttrain.console import size_text, write
from disttrain.kernels.bench import Measured, copy_bytes_per_s, measure, measure_adamw, measure_packing
from disttrain.kernels.bench_cases import cases

HEAD = (
    "kernel",
    "step",
    "eager ms",
    "inductor ms",
    "kernel ms",
    "of inductor",
    "of copy",
    "TFLOP/s",
    "peak",
    "eager's",
)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = copy_bytes_per_s(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    write(f"{name}, torch {torch.__version__}: a copy reads and writes {speed / 1e9:.0f} GB/s")
    write(_line(HEAD))
    found: list[Measured] = []
    for one in _all(options, device):
        write(_line(_row(one, speed)))
        found.append(one)
    if options.out:
        report = {
            "device": name,
            "torch_version": torch.__version__,
            "copy_bytes_per_s": speed,
            "arguments": {key: str(value) for key, value in vars(options).items()},
            "results": [asdict(one) for one in found],
        }
        options.out.write_text(json.dumps(report, indent=1))
    return 0


def _all(options: argparse.Namespace, device: torch.device) -> Iterator[Measured]:
    for case in cases(device, options.tokens, options.dim, options.vocab):
        if case.name.startswith(options.only):
            yield from measure(case, device)
    if "AdamW".startswith(options.only):
        yield from measure_adamw(device, 64, options.tokens * options.dim // 16)
    if "pack".startswith(options.only):
        yield from measure_packing(device, options.dim)


def _line(cells: Sequence[str]) -> str:
    """Each is shown when it is measured, so nobody knows yet how wide the others are."""
    name, step, *numbers = cells
    return f"{name:44}{step:10}" + "".join(f"{number:>13}" for number in numbers)


def _row(one: Measured, speed: float) -> Sequence[str]:
    seconds = one.seconds
    return (
        one.name,
        "both ways" if one.is_whole_step else "forward",
        *(f"{1e3 * seconds[name]:.3f}" for name in ("eager", "inductor", "kernel")),
        f"{seconds['kernel'] / seconds['inductor']:.2f}",
        f"{one.share_of_copy(speed):.0%}" if one.moved_bytes else "",
        f"{one.flops / seconds['kernel'] / 1e12:.0f}" if one.flops else "",
        size_text(one.peak_bytes["kernel"]),
        size_text(one.peak_bytes["eager"]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m disttrain.kernels", description="Measure the kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="each against torch's operators, Inductor's and a copy")
    bench.add_argument("--only", default="", metavar="NAME", help="those whose name begins so")
    bench.add_argument("--tokens", type=int, default=16384)
    bench.add_argument("--dim", type=int, default=4096)
    bench.add_argument("--vocab", type=int, default=128256)
    bench.add_argument("--out", type=Path, help="write a JSON file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
