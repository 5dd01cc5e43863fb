"""How fast a few random batches are memorised in float8, and in bf16 with noise in the gradients, on one GPU.

    python benchmarks/float8_memorised_gpu.py [--json FILE]

There is nothing to learn in them, so that the first steps of Adam, which are as long whatever the gradients' sizes,
tell how exact gradients are. Compared are float8's gradients with those of bf16 at random weights, then losses by step.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import asked
from models.model import Llama, Sizes

from disttrain.kernels import use_float8

SIZES = Sizes(dim=2048, layers=4, heads=16, kv_heads=8, ffn=7168, vocab=32000, seq=2048)
WAYS = ("bf16", "float8 tensorwise", "float8 rowwise", "bf16, noise 0.1", "bf16, noise 0.2", "bf16, noise 0.4")
NUM_BATCHES = 4


def made(base: Llama, way: str) -> Llama:
    model = copy.deepcopy(base)
    if way.startswith("float8"):
        use_float8(model, way.split()[1], num_tokens=None, report=lambda _: None)
    return model


def step(model: Llama, tokens: torch.Tensor) -> float:
    """The loss; gradients are in the parameters."""
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def block_grads(model: Llama) -> dict[str, torch.Tensor]:
    """Of the matrices that float8 multiplies."""
    named = model.named_parameters()
    return {name: p.grad for name, p in named if "blocks" in name and p.ndim == 2 and p.grad is not None}


def grad_errors(base: Llama, tokens: torch.Tensor, way: str) -> list[float]:
    """By matrix, as a share of the gradient's length in bf16; sorted."""
    exact, found = made(base, "bf16"), made(base, way)
    for model in (exact, found):
        step(model, tokens)
    wished = block_grads(exact)
    return sorted(
        ((grad - wished[name]).norm() / wished[name].norm()).item() for name, grad in block_grads(found).items()
    )


def losses(base: Llama, batches: list[torch.Tensor], way: str, num_steps: int, lr: float) -> list[float]:
    model = made(base, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    noise = float(way.rsplit(maxsplit=1)[-1]) if "noise" in way else 0.0
    found = []
    for number in range(num_steps):
        found.append(round(step(model, batches[number % NUM_BATCHES]), 4))
        for grad in block_grads(model).values() if noise else ():
            grad.add_(noise * grad.square().mean().sqrt() * torch.randn_like(grad))
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", type=Path, help="write figures here")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(5)
    shape = (2, SIZES.seq + 1)
    batches = [torch.randint(0, SIZES.vocab, shape, generator=generator).cuda() for _ in range(NUM_BATCHES)]
    torch.manual_seed(1)
    base = Llama(SIZES).cuda()
    base.init(1)
    errors = {way: grad_errors(base, batches[0], way) for way in WAYS if way.startswith("float8")}
    for way, found in errors.items():
        print(f"{way}: gradients are off by {statistics.median(found):.2f} (median), {found[-1]:.2f} at most")
    curves = {}
    for way in WAYS:
        curves[way] = losses(base, batches, way, options.steps, options.lr)
        print(f"{way:18s}", *(f"{loss:7.3f}" for loss in curves[way]), flush=True)
    if options.json:
        report = {
            "command": asked(),
            "torch_version": torch.__version__,
            "topology": "1 x NVIDIA H200",
            "errors": errors,
            "losses": curves,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
