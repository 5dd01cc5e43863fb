"""Each implementation of attention on this GPU, for causal masks, windows, documents and more.

    python benchmarks/attention_gpu.py [--only causal window] [--lengths 4096 8192] [--out FILE]

The best of each case is marked with a star.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from harness import asked, flags_of, keep
from kernels.attention import Sizes, timed

from disttrain.console import write


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
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
    results = []
    for case in timed(sizes, torch.device("cuda", torch.cuda.current_device()), options.only):
        results.append(asdict(case))
        best = min(case.seconds, key=lambda each: case.seconds[each], default="")
        cells = (
            f"{each}{'*' if each == best else ''} {1e3 * seconds:.3f} ms {case.flops / seconds / 1e12:.0f} TFLOP/s"
            for each, seconds in case.seconds.items()
        )
        step = "both ways" if case.is_whole_step else "forward"
        write(f"{case.name:24}{step:10}" + "".join(f"{cell:32}" for cell in cells))
        if options.out:
            # Each case takes its time to compile; who stops it keeps what there is.
            report = {"machine": name, "command": asked(), "arguments": flags_of(options)}
            keep({**report, "results": results}, options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="those whose names begin so")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--window", type=int, default=1024, help="how many keys a query sees")
    parser.add_argument("--document", type=int, default=2048, help="a document's length, on average")
    parser.add_argument("--out", type=Path, help="write a JSON file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
