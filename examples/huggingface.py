"""A model of Hugging Face's as it is: cut by a plan that is found, sharded, trained, saved so that they read it.

    disttrain-launch --standalone --nproc-per-node 4 examples/huggingface.py --out runs/huggingface

The model is drawn at random and learns to count; `from_pretrained` takes the place of a `from_config`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain import tp
from disttrain.checkpoint import training_state
from disttrain.checkpoint.interop import save_safetensors
from disttrain.fsdp2 import fully_shard

try:
    from transformers import AutoModelForCausalLM, Qwen3Config
except ModuleNotFoundError:
    sys.exit("huggingface: transformers is not installed. Run: pip install transformers")

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
ROWS, LENGTH, STEPS = 8, 32, 12


def rows_of(step: int) -> torch.Tensor:
    starts = torch.randint(64, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(LENGTH + 1)) % 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"), help="folder of the weights")
    out = parser.parse_args().out
    if out.exists():
        sys.exit(f"huggingface: --out {out} is there already. Remove it, or name another folder.")
    disttrain.init_process_group()
    say = print if disttrain.get_rank() == 0 else lambda _: None
    size, device = disttrain.get_world_size(), disttrain.current_world().device
    num_tp = 2 if size % 2 == 0 else 1
    mesh = disttrain.init_device_mesh(device.type, (size // num_tp, num_tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).to(device)
    if num_tp > 1:
        plan = tp.plan_for(model)
        say(plan.table(num_tp, ROWS * LENGTH, torch.float32))
        tp.parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        own = rows_of(step).chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device)
        logits = model(own[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        disttrain.all_reduce(mean := loss.detach(), disttrain.ReduceOp.AVG)
        say(f"step {step:2}: loss {mean.item():.5f}")

    with torch.no_grad():
        trained = model(rows_of(0)[:, :-1].to(device)).logits
    save_safetensors(training_state(model)["model"], out)
    if disttrain.get_rank() == 0:
        CONFIG.save_pretrained(out)
        theirs = AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            difference = (theirs(rows_of(0)[:, :-1]).logits - trained.cpu()).abs().max().item()
        say(f"{out}: transformers reads it, and computes the same logits but for {difference:.0e}")
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
