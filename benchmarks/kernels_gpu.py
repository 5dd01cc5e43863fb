"""Each kernel against torch's operators one by one, Inductor's of the same code, and a copy of as many bytes.

    python benchmarks/kernels_gpu.py [--only swiglu] [--tokens 16384] [--out FILE]

Without a GPU it measures the reference operators of the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from harness import asked, flags_of, keep
from kernels.cases import cases
from kernels.timing import Measured, copy_bytes_per_s, measure, measure_adamw, measure_packing

from disttrain.console import size_text, write

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
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    speed = copy_bytes_per_s(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    write(f"{name}, torch {torch.__version__}: a copy reads and writes {speed / 1e9:.0f} GB/s")
    write(_line(HEAD))
    results: list[Measured] = []
    for measured in _all(options, device):
        write(_line(_row(measured)))
        results.append(measured)
    if options.out:
        report = {"machine": name, "command": asked(), "copy_bytes_per_s": speed, "arguments": flags_of(options)}
        keep({**report, "results": [asdict(measured) for measured in results]}, options.out)
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


def _row(measured: Measured) -> Sequence[str]:
    seconds = measured.seconds
    return (
        measured.name,
        "both ways" if measured.is_whole_step else "forward",
        *(f"{1e3 * seconds[name]:.3f}" for name in ("eager", "inductor", "kernel")),
        f"{seconds['kernel'] / seconds['inductor']:.2f}",
        f"{measured.share_of_copy:.0%}" if measured.moved_bytes else "",
        f"{measured.flops / seconds['kernel'] / 1e12:.0f}" if measured.flops else "",
        size_text(measured.peak_bytes["kernel"]),
        size_text(measured.peak_bytes["eager"]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="those whose name begins so")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--out", type=Path, help="write a JSON file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
