"""`python -m disttrain.kernels`: how fast the kernels are on this machine (bench), and what serves attention."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from disttrain.command_line import Parser
from disttrain.console import size_text, write
from disttrain.kernels.attention.bench import Sizes, timed
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
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if options.command == "attention":
        return _attention(options, device)
    speed = copy_bytes_per_s(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    write(f"{name}, torch {torch.__version__}: a copy reads and writes {speed / 1e9:.0f} GB/s")
    write(_line(HEAD))
    found: list[Measured] = []
    for one in _all(options, device):
        write(_line(_row(one)))
        found.append(one)
    _keep(options, {"device": name, "copy_bytes_per_s": speed}, [asdict(one) for one in found])
    return 0


def _attention(options: argparse.Namespace, device: torch.device) -> int:
    if device.type != "cuda":
        write("There is no GPU: torch's scaled_dot_product_attention serves masks, products and a softmax the rest.")
        return 1
    name = torch.cuda.get_device_name()
    sizes = Sizes(
        options.batch,
        options.heads,
        options.kv_heads,
        options.head_dim,
        options.lengths,
        options.window,
        options.document,
    )
    write(f"{name}, torch {torch.__version__}, bf16: {sizes.batch_size} x {sizes.num_heads}/{sizes.num_kv_heads} heads")
    found = []
    for one in timed(sizes, device, options.only):
        found.append(asdict(one))
        best = min(one.seconds, key=lambda each: one.seconds[each], default="")
        cells = (
            f"{each}{'*' if each == best else ''} {1e3 * seconds:.3f} ms {one.flops / seconds / 1e12:.0f} TFLOP/s"
            for each, seconds in one.seconds.items()
        )
        write(f"{one.name:24}{'both ways' if one.is_whole_step else 'forward':10}" + "".join(f"{c:32}" for c in cells))
        # Each takes its time to compile; who stops it keeps what there is.
        _keep(options, {"device": name}, found)
    return 0


def _keep(options: argparse.Namespace, machine: dict[str, object], results: Sequence[object]) -> None:
    """In a file, if that is asked for."""
    if options.out:
        report = {
            **machine,
            "torch_version": torch.__version__,
            "arguments": {key: str(value) for key, value in vars(options).items() if key != "out"},
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=1))


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


def _row(one: Measured) -> Sequence[str]:
    seconds = one.seconds
    return (
        one.name,
        "both ways" if one.is_whole_step else "forward",
        *(f"{1e3 * seconds[name]:.3f}" for name in ("eager", "inductor", "kernel")),
        f"{seconds['kernel'] / seconds['inductor']:.2f}",
        f"{one.share_of_copy:.0%}" if one.moved_bytes else "",
        f"{one.flops / seconds['kernel'] / 1e12:.0f}" if one.flops else "",
        size_text(one.peak_bytes["kernel"]),
        size_text(one.peak_bytes["eager"]),
    )


def _parser() -> Parser:
    parser = Parser(prog="python -m disttrain.kernels", description="Measure the kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="each against torch's operators, Inductor's and a copy")
    bench.add_argument("--only", default="", metavar="NAME", help="those whose name begins so")
    bench.add_argument("--tokens", type=int, default=16384)
    bench.add_argument("--dim", type=int, default=4096)
    bench.add_argument("--vocab", type=int, default=128256)
    attention = commands.add_parser("attention", help="each implementation of attention, and which is best")
    attention.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="those whose names begin so")
    attention.add_argument("--batch", type=int, default=1)
    attention.add_argument("--heads", type=int, default=32)
    attention.add_argument("--kv-heads", type=int, default=8)
    attention.add_argument("--head-dim", type=int, default=128)
    attention.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    attention.add_argument("--window", type=int, default=1024, help="how many keys a query sees")
    attention.add_argument("--document", type=int, default=2048, help="a document's length, on average")
    for command in (bench, attention):
        command.add_argument("--out", type=Path, help="write a JSON file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
