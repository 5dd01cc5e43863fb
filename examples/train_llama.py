"""Train a Llama on text: on one CPU or many GPUs, cut in any of the ways there are, all in one line of `--mesh`.

    disttrain-launch --standalone --nproc-per-node 2 examples/train_llama.py
    disttrain-launch --standalone --nproc-per-node 8 examples/train_llama.py --mesh dp=2,tp=2,pp=2 --schedule ZBV
    disttrain-launch --standalone --nproc-per-node 8 examples/train_llama.py --config examples/configs/8b.toml
    disttrain-launch --standalone --nproc-per-node 4 examples/train_llama.py --resume --mesh tp=2
    disttrain-launch --nnodes 2:3 --max-restarts 3 --rdzv-endpoint HOST0:29500 ... train_llama.py --out DIR --batch 48
    disttrain-launch submit slurm --requeue --nnodes 2 --nproc-per-node 8 ... train_llama.py --out DIR --auto-resume

`train` is the whole story. What it tells lies in `llama/`: how the model is cut and placed (`parallel.py`), what a step
computes (`steps.py`), where tokens come from (`tokens.py`), others' weights (`huggingface.py`), what you see.
"""

from __future__ import annotations

import math
import signal
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from llama import flags as command_line
from llama.balance import Loads, uncounted
from llama.flags import CHECKPOINTS
from llama.huggingface import has_weights, load_weights, save_weights
from llama.meshes import make_mesh, token_axis
from llama.model import Llama
from llama.parallel import Ways, place
from llama.ranks import is_alike, join, peak_memory_bytes, together
from llama.steps import Pipelined, Stepper, Whole, mean_loss
from llama.tokens import Tokens, read_tokens
from llama.trackers import make_trackers
from torch import Tensor

import disttrain
from disttrain import kernels
from disttrain.checkpoint import Checkpointer, set_training_state, training_state
from disttrain.compiling import CapturedStep, capture_step
from disttrain.data import Loader, Prefetcher, Windows
from disttrain.errors import CheckpointError, SettingError
from disttrain.experts import expert_numbers, router_numbers
from disttrain.flight_recorder import StepSummaries, enable
from disttrain.trackers import Tracking, track

if missing := [name for name in ("matplotlib", "rich") if find_spec(name) is None]:
    sys.exit(f"train_llama: {' and '.join(missing)} not installed. Run: pip install 'disttrain[examples]'")

from llama.facts import describe, results
from llama.record import Record, Row
from llama.screen import Meter, Screen

TITLE = "disttrain: a Llama"
WARMUP_STEPS = 20
FINAL_LR_SHARE = 0.1
MAX_GRADIENT_NORM = 1.0
NUM_EVALUATION_BATCHES = 4
TEMPERATURE = 0.8


@dataclass
class Run:
    """What this rank trains with. `batches` are those of its replica, without an end."""

    flags: Namespace
    device: torch.device
    tokens: Tokens
    replica: int
    batches: Prefetcher
    model: Llama
    stepper: Stepper
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], Tensor]
    """From rows to their loss, with all that a step computes between them."""
    checkpointer: Checkpointer
    token_axis: disttrain.DeviceMesh
    """The ranks that see different tokens."""


def make_run(flags: Namespace, device: torch.device) -> Run:
    """Everything but the first step."""
    with together():
        tokens = read_tokens(flags.data, flags.tokenizer, flags.seq)
        sizes = fit_vocabulary(flags, tokens.tokenizer.vocabulary_size)
    with together():
        check_same(tokens)
    mesh = make_mesh(flags.mesh, device)
    is_captured = flags.capture == "on" or (flags.capture == "auto" and device.type == "cuda")
    ways = Ways(flags.dtype, flags.kernels, flags.recompute, flags.compile, is_captured)
    placed = place(sizes, mesh, flags.plan, ways, length=flags.seq, seed=flags.seed)
    if flags.plan is None:
        stepper: Stepper = Whole(
            placed, mesh, flags.microbatches, uses_kernels=flags.kernels, reduces_each=flags.reduce_each
        )
    else:
        stepper = Pipelined(placed, mesh, flags.plan)
    optimizer = make_optimizer(placed.model, uses_kernels=flags.kernels)
    step = make_step(stepper, optimizer)
    if is_captured:
        step = capture_step(step, modules=[placed.model], optimizers=[optimizer])
    checkpointer = Checkpointer(flags.out / CHECKPOINTS, keep=2)
    windows = Windows(tokens.training, flags.seq, seed=flags.seed)
    loader = Loader(windows, flags.batch, mesh=mesh["replicate", "dp", "ep"], seed=flags.seed, endless=True)
    batches = Prefetcher(loader, device)
    held = (placed.model, stepper, optimizer, step, checkpointer, token_axis(mesh))
    return Run(flags, device, tokens, loader.replica, batches, *held)


def check_alike(flags: Namespace) -> None:
    """Raises SettingError, on all ranks, where nodes that share no folder would do different things."""
    if not is_alike(flags.resume, zlib.crc32(str(flags.out).encode())):
        found = "with" if flags.resume else "without"
        problem = f"not all ranks see {flags.out} {found} a checkpoint, as this one does."
        raise SettingError("train_llama --out", problem, "Name a folder that all nodes share.")


def check_same(tokens: Tokens) -> None:
    """Raises SettingError, on all ranks, where nodes have texts of other sizes: rows would not be the same rows."""
    training, held_out = tokens.training.size, tokens.held_out.size
    if not is_alike(training, held_out):
        problem = (
            f"not all ranks find {training} + {held_out} {tokens.tokenizer.unit}s in {tokens.name}, as this one does."
        )
        raise SettingError("train_llama --data", problem, "Name a folder that is the same on all nodes.")


def fit_vocabulary(flags: Namespace, vocabulary_size: int) -> command_line.LlamaConfig:
    """The model's sizes with the tokenizer's vocabulary; a model of others' keeps its own, which must be as large."""
    if not command_line.is_folder(flags.model):
        return replace(flags.sizes, vocabulary_size=vocabulary_size, max_length=flags.seq)
    if vocabulary_size > flags.sizes.vocabulary_size or flags.seq > flags.sizes.max_length:
        own = f"{flags.sizes.vocabulary_size} tokens and sequences of {flags.sizes.max_length}"
        problem = f"{flags.model} knows {own}; the tokenizer has {vocabulary_size}, and --seq is {flags.seq}."
        raise SettingError("train_llama --model", problem, "Give the model's own --tokenizer, and a --seq it knows.")
    return flags.sizes


def make_step(stepper: Stepper, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """All that is computed for one batch."""

    def step(batch: Tensor) -> Tensor:
        loss = stepper.train(batch)
        stepper.clip(MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_optimizer(model: Llama, *, uses_kernels: bool) -> torch.optim.Optimizer:
    """AdamW that decays matrices, but no gains of norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    if uses_kernels:
        return kernels.AdamW(groups, betas=(0.9, 0.95))
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, num_steps: int, highest: float) -> float:
    """Up along a line, down along a cosine (Loshchilov and Hutter, arXiv 1608.03983)."""
    if step < WARMUP_STEPS:
        return highest * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return highest * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2)


def train_step(run: Run, rate: float) -> float:
    """One step of all ranks on the next rows; returns their mean loss."""
    is_captured = isinstance(run.step, CapturedStep) and run.device.type == "cuda"
    for group in run.optimizer.param_groups:
        if "capturable" in group:
            # A resumed run has that of another, which was captured or not.
            group["capturable"] = is_captured
        if not group.get("capturable"):
            group["lr"] = rate
        elif isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate, device=run.device)
    return mean_loss(run.step(next(run.batches)), run.flags.mesh)


def evaluate(run: Run) -> float:
    """The loss on held-out text, of which each replica takes its rows."""
    num_rows, num_in_all = run.flags.batch // run.flags.mesh.num_replicas, NUM_EVALUATION_BATCHES * run.flags.batch
    first_rows = range(run.replica * num_rows, num_in_all, run.flags.batch)
    batches = [run.tokens.held_out_rows(run.flags.seq, first, num_rows, num_in_all) for first in first_rows]
    with uncounted(run.model):
        losses = [run.stepper.loss(batch.to(run.device)) for batch in batches]
    return mean_loss(torch.stack(losses).mean(), run.flags.mesh)


def show_held_out(run: Run, loads: Loads, meter: Meter, screen: Screen, tracking: Tracking) -> float:
    """Evaluates, shows the loss and the loads of experts, and passes both on to trackers."""
    started_s = time.perf_counter()
    held_out_loss = evaluate(run)
    meter.add_evaluation(time.perf_counter() - started_s)
    screen.show_evaluation(held_out_loss, loads.words)
    tracking.write(meter.step, {"held_out_loss": held_out_loss, **router_numbers(loads.last, has_experts=True)})
    return held_out_loss


def sample(run: Run, prompt: Sequence[int]) -> list[int]:
    """A continuation, token by token. Every rank computes it, since each has a part of the model."""
    generator = torch.Generator().manual_seed(run.flags.seed)
    tokens = list(prompt)[-run.flags.seq :] or [0]
    for _ in range(run.flags.sample):
        window = tokens[-run.flags.seq :]
        # Always as long as in training: what comes after a place does not matter to it.
        row = torch.tensor([window + [0] * (run.flags.seq - len(window))], device=run.device)
        logits = run.stepper.logits(row, len(window) - 1)
        token = torch.zeros(1, dtype=torch.int64)
        if logits is not None:
            token = torch.multinomial((logits.float().cpu() / TEMPERATURE).softmax(-1), 1, generator=generator)
        tokens.append(agreed(token, is_known=logits is not None))
    return tokens[len(tokens) - run.flags.sample :]


def agreed(token: Tensor, *, is_known: bool) -> int:
    """What the first of those ranks that know it has drawn: GPUs of different make need not round alike."""
    size = disttrain.get_world_size()
    first = torch.tensor(disttrain.get_rank() if is_known else size)
    disttrain.all_reduce(first, disttrain.ReduceOp.MIN)
    disttrain.broadcast(token, src=int(first))
    return int(token)


def state_of(run: Run) -> dict[str, object]:
    """What a checkpoint has: nothing in it depends on the mesh, so that any other can go on from it."""
    return {**training_state(run.model, run.optimizer), "data": run.batches, "tokens": run.tokens.training.size}


def resume(run: Run) -> int:
    """Take on the last checkpoint, on whichever mesh it was saved; returns how many steps it has behind it."""
    state = state_of(run)
    num_steps = run.checkpointer.load(state)
    if num_steps > run.flags.steps:
        problem = f"the run in {run.flags.out} has {num_steps} steps behind it, more than --steps {run.flags.steps}."
        raise SettingError("train_llama --resume", problem, "Give a larger --steps.")
    saved_size, own_size = state["tokens"], run.tokens.training.size
    if saved_size != own_size:
        problem = f"the run in {run.flags.out} has read a text of {saved_size} tokens; now it has {own_size}."
        raise SettingError("train_llama --resume", problem, "Name the text as it was, or start another run.")
    set_training_state(run.model, run.optimizer, state)
    return num_steps


def show_results(run: Run, record: Record, meter: Meter, screen: Screen, profiler: disttrain.profile | None) -> None:
    """Writes a continuation, and the weights where they are asked for; shows what came of the run."""
    tokenizer = run.tokens.tokenizer
    prompt = run.tokens.prompt if run.flags.prompt is None else tokenizer.begin(run.flags.prompt.encode())
    with uncounted(run.model):
        continuation = sample(run, prompt)
    if run.flags.export is not None:
        save_weights(run.model, run.flags.export, tokenizer)
    duration_s = screen.end_bar()
    if profiler is not None and profiler.breakdown is not None:
        screen.show_text(f"{profiler.breakdown}")
    if continuation:
        screen.show_continuation(tokenizer.decode(prompt), tokenizer.decode(continuation))
    screen.show_facts("done", results(run.flags, record, meter, duration_s))


def train(flags: Namespace, device: torch.device) -> bool:
    """The whole story, as each rank sees it; False where the job was told to go, and has saved."""
    is_first_rank = disttrain.get_rank() == 0
    run = make_run(flags, device)
    with together():
        first_step = 0
        if flags.resume:
            first_step = resume(run)
        elif command_line.is_folder(flags.model) and has_weights(Path(flags.model)):
            load_weights(run.model, Path(flags.model))
        if is_first_rank:
            command_line.save(flags)
        folder = flags.out if is_first_rank else None
        record = Record(folder, TITLE, first_step, NUM_EVALUATION_BATCHES)
        loads = Loads(run.model, run.token_axis, folder, first_step)
        trackers = make_trackers(flags.track, flags.out)

    meter = Meter(
        flags.steps,
        first_step,
        tokens_per_step=flags.batch * flags.seq,
        eval_every=flags.eval_every,
        eval_batches=NUM_EVALUATION_BATCHES,
    )
    screen = Screen(meter, is_shown=is_first_rank)
    facts = describe(flags, run.tokens, run.model.config, device, is_captured=isinstance(run.step, CapturedStep))
    screen.show_facts(TITLE, facts)
    tracking = track(*trackers, folder=flags.out / CHECKPOINTS, first_step=first_step, config=command_line.kept(flags))
    summaries = StepSummaries(enable(), meter.take_summary, tracking.take_summary)
    profiler = None if flags.profile is None else disttrain.profile(flags.profile, wait=4, warmup=1, active=3)
    with record, loads, tracking, run.checkpointer, run.batches, profiler or nullcontext():
        for step in range(first_step, flags.steps):
            held_out_loss = None
            if step % flags.eval_every == 0:
                held_out_loss = show_held_out(run, loads, meter, screen, tracking)
            started_s = time.perf_counter()
            loss = train_step(run, learning_rate(step, flags.steps, flags.lr))
            balance = loads.read(step)
            meter.add(loss, time.perf_counter() - started_s, loads.worst)
            summaries.step()
            rate = None if meter.tokens_per_s is None else meter.tokens_per_s / disttrain.get_world_size()
            disttrain.report(step=meter.step, loss=loss, tokens_per_s=rate, **expert_numbers(balance))
            record.add(Row(step, loss, held_out_loss))
            screen.show_step(peak_memory_bytes(device))
            is_leaving = disttrain.stop_requested() and step + 1 < flags.steps
            if is_leaving or (flags.save_every and ((step + 1) % flags.save_every == 0 or step + 1 == flags.steps)):
                # Written beside the next steps; a save that fails is told at the next one, or at the end.
                run.checkpointer.async_save(step + 1, state_of(run), run.optimizer)
            if profiler is not None:
                profiler.step()
            if is_leaving:
                return False  # when the save is whole: to leave the block waits for it
        held_out_loss = show_held_out(run, loads, meter, screen, tracking)
        record.add(Row(flags.steps, None, held_out_loss))
    show_results(run, record, meter, screen, profiler)
    return True


def how_to_go_on(out: Path) -> str:
    if command_line.has_run(out):
        return f"--resume --out {out} goes on from the last checkpoint"
    return f"nothing was saved in {out} yet; --save-every says how often"


def main(arguments: Sequence[str] | None = None) -> None:
    device = join()
    with together():
        flags = command_line.parse(arguments, disttrain.get_world_size())
    with together():
        check_alike(flags)
    if flags.dtype is None:
        flags.dtype = "bf16" if device.type == "cuda" else "fp32"
    try:
        # Asked for the first time here, so that a notice while the model is made is heard, too.
        is_over = not disttrain.stop_requested() and train(flags, device)
    except CheckpointError:  # which all ranks have alike
        with together():
            raise
    except KeyboardInterrupt:
        if disttrain.get_rank() == 0:
            print(f"stopped; {how_to_go_on(flags.out)}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if not is_over and disttrain.get_rank() == 0:
        print(f"told to go; {how_to_go_on(flags.out)}", file=sys.stderr)
    disttrain.destroy_process_group()
    sys.exit(None if is_over else disttrain.REQUEUE_EXIT_CODE)


if __name__ == "__main__":
    main()
