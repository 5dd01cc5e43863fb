"""Train a byte-level Llama on text, with its parameters sharded over all ranks, on CPUs or GPUs.

    disttrain-launch --nproc-per-node 2 examples/train_lm.py
    disttrain-launch --nproc-per-node 8 examples/train_lm.py --data DIR --preset base --batch 64 --seq 1024
    disttrain-launch --nproc-per-node 2 examples/train_lm.py --resume --compile
    disttrain-launch --nnodes 2:3 --max-restarts 3 --rdzv-endpoint HOST0:29500 ... examples/train_lm.py --out DIR

`train` is the whole story; what it tells is above it, and in `lm/`: the network, the text, the screen.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from lm import flags as command_line
from lm.flags import CHECKPOINTS
from lm.model import PRESETS, Llama
from lm.ranks import join, mean_over_ranks, own_rows, peak_memory_bytes, together
from lm.text import Text, read_text
from torch import Tensor

import disttrain
from disttrain.checkpoint import Checkpointer, get_state_dict, set_state_dict
from disttrain.compiling import compile_blocks
from disttrain.console import clock, short
from disttrain.errors import SettingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard

try:
    from lm.record import Record, Row
    from lm.screen import Meter, Screen
except ModuleNotFoundError as missing:
    sys.exit(f"train_lm: {missing.name} is not installed. Run: pip install 'disttrain[examples]'")

TITLE = "disttrain: a byte-level Llama"
WARMUP_STEPS = 20
FINAL_LR_SHARE = 0.1
MAX_GRADIENT_NORM = 1.0
NUM_EVALUATION_BATCHES = 4
NUM_SAMPLED_BYTES = 240
TEMPERATURE = 0.6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(preset: str, *, seed: int, device: torch.device, dtype: torch.dtype) -> Llama:
    """The network, sharded over all ranks. No rank ever holds more than its part of it, and one block."""
    with torch.device("meta"):
        model = shard(Llama(PRESETS[preset]), device=device, dtype=dtype)
    model.to_empty(device=device)
    torch.manual_seed(seed)
    model.init()
    return model


def shard(model: Llama, *, device: torch.device, dtype: torch.dtype) -> Llama:
    """Leave each rank its part of the parameters; blocks are gathered one by one, while they compute."""
    mesh = disttrain.init_device_mesh(device.type, (disttrain.get_world_size(),), mesh_dim_names=("dp",))
    # Gradients are averaged in float32; the rotation's angles stay in it too, so inputs are not cast.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def make_optimizer(model: Llama) -> torch.optim.AdamW:
    """AdamW that decays matrices, but no gains of norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, num_steps: int, highest: float) -> float:
    """Up along a line, down along a cosine (Loshchilov and Hutter, arXiv 1608.03983)."""
    if step < WARMUP_STEPS:
        return highest * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return highest * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2)


def loss_of(model: Llama, batch: Tensor) -> Tensor:
    """Mean negative log-likelihood of each next byte, in nats; batch (B, S + 1) int64."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train_step(model: Llama, optimizer: torch.optim.Optimizer, batch: Tensor, rate: float) -> Tensor:
    """One step on this rank's rows; returns their loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loss_of(model, batch)
    loss.backward()  # leaves each rank its part of the gradient's average over ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def evaluate(model: Llama, text: Text, flags: Namespace, device: torch.device) -> float:
    """The loss on held-out text, of which each rank takes its rows."""
    batches = text.held_out_batches(NUM_EVALUATION_BATCHES, batch_size=flags.batch, seq_size=flags.seq)
    losses = [loss_of(model, own_rows(batch).to(device)) for batch in batches]
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def sample(model: Llama, prompt: bytes, flags: Namespace, device: torch.device) -> bytes:
    """A continuation, byte by byte. Every rank computes it, since the parameters are gathered from all of them."""
    generator = torch.Generator().manual_seed(flags.seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(NUM_SAMPLED_BYTES):
        logits = model(tokens[:, -flags.seq :].to(device))[0, -1].float().cpu()
        token = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        disttrain.broadcast(token, src=0)  # GPUs of different make need not round alike
        tokens = torch.cat((tokens, token[None]), dim=1)
    return bytes(tokens[0, len(prompt) :].tolist())


def resume(checkpointer: Checkpointer, model: Llama, optimizer: torch.optim.Optimizer, flags: Namespace) -> int:
    """Take on the last checkpoint, on however many ranks it was saved; returns how many steps it has behind it.

    The data need no state but this number: see `lm/text.py`.
    """
    state = get_state_dict(model, optimizer)
    num_steps = checkpointer.load(state)
    if num_steps > flags.steps:
        problem = f"the run in {flags.out} has {num_steps} steps behind it, more than --steps {flags.steps}."
        raise SettingError("train_lm --resume", problem, "Give a larger --steps.")
    set_state_dict(model, optimizer, state)
    return num_steps


def train(flags: Namespace, device: torch.device) -> None:
    """The whole story, as each rank sees it."""
    is_first_rank = disttrain.get_rank() == 0
    with together():
        text = read_text(flags.data, flags.seq)
    model = make_model(flags.preset, seed=flags.seed, device=device, dtype=DTYPES[flags.dtype])
    if flags.compile:
        compile_blocks(model)
    optimizer = make_optimizer(model)
    checkpointer = Checkpointer(flags.out / CHECKPOINTS, keep=2)
    with together():
        first_step = resume(checkpointer, model, optimizer, flags) if flags.resume else 0
        if is_first_rank:
            command_line.save(flags)

    meter = Meter(flags.steps, first_step, tokens_per_step=flags.batch * flags.seq)
    screen = Screen(meter, is_shown=is_first_rank)
    screen.show_facts(TITLE, describe(flags, text, model, device))
    with Record(flags.out if is_first_rank else None, f"{TITLE} on {text.name}", first_step) as record:
        for step in range(first_step, flags.steps):
            held_out_loss = None
            if step % flags.eval_every == 0:
                held_out_loss = evaluate(model, text, flags, device)
                screen.show_evaluation(held_out_loss)
            started_s = time.perf_counter()
            batch = own_rows(text.batch(step, seed=flags.seed, batch_size=flags.batch, seq_size=flags.seq))
            rate = learning_rate(step, flags.steps, flags.lr)
            loss = mean_over_ranks(train_step(model, optimizer, batch.to(device), rate))
            meter.add(loss, time.perf_counter() - started_s)
            own_tokens_per_s = meter.tokens_per_s / disttrain.get_world_size()
            disttrain.report(step=meter.step, loss=loss, tokens_per_s=own_tokens_per_s)
            record.add(Row(step, loss, held_out_loss))
            screen.show_step(peak_memory_bytes(device))
            if (step + 1) % flags.save_every == 0 or step + 1 == flags.steps:
                with together():
                    checkpointer.save(step + 1, get_state_dict(model, optimizer))
        held_out_loss = evaluate(model, text, flags, device)
        screen.show_evaluation(held_out_loss)
        record.add(Row(flags.steps, None, held_out_loss))
    prompt = flags.prompt or text.prompt
    continuation = sample(model, prompt, flags, device)
    duration_s = screen.end_bar()
    screen.show_continuation(prompt, continuation)
    screen.show_facts("done", results(flags, record, duration_s))


def describe(flags: Namespace, text: Text, model: Llama, device: torch.device) -> dict[str, str]:
    """What is trained on what."""
    config = PRESETS[flags.preset]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    num_ranks = disttrain.get_world_size()
    return {
        "text": f"{text.name}, {text.num_files} files",
        "bytes": f"{short(len(text.training))} to train on, {short(len(text.held_out))} held out",
        "model": f"{flags.preset}: {config.num_layers} layers, dim {config.dim}, {short(num_parameters)} parameters",
        "ranks": f"{num_ranks} on {device_name}, {flags.dtype}; each keeps 1/{num_ranks} of the parameters",
        "steps": f"{flags.steps} of {flags.batch} sequences of {flags.seq} bytes, learning rate {flags.lr:g}",
        "out": f"{flags.out}",
    }


def results(flags: Namespace, record: Record, duration_s: float) -> dict[str, str]:
    """What came of it, and where it lies."""
    losses = [loss for _, loss in record.held_out_losses()]
    return {
        "held out": f"{losses[0]:.3f} → {losses[-1]:.3f} nats per byte",
        "time": clock(duration_s),
        "curve": f"{flags.out / 'loss.png'}",
        "numbers": f"{flags.out / 'loss.csv'}",
        "checkpoint": f"{flags.out / CHECKPOINTS}, step {flags.steps}",
        "to go on": f"--resume --out {flags.out} --steps {2 * flags.steps}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    device = join()
    with together():
        flags = command_line.parse(arguments, disttrain.get_world_size())
    if flags.dtype is None:
        flags.dtype = "bf16" if device.type == "cuda" else "fp32"
    try:
        train(flags, device)
    except KeyboardInterrupt:
        if disttrain.get_rank() == 0:
            print(f"stopped; --resume --out {flags.out} goes on from the last checkpoint", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
