"""Says in words what a run trains on what, and what came of it."""

from __future__ import annotations

from argparse import Namespace

import torch

import disttrain
from disttrain.console import clock, short
from llama.config import LlamaConfig
from llama.flags import CHECKPOINTS
from llama.meshes import MeshPlan
from llama.model import Llama
from llama.record import Record
from llama.screen import Meter
from llama.tokens import Tokens


def describe(
    flags: Namespace, tokens: Tokens, config: LlamaConfig, device: torch.device, *, is_captured: bool
) -> dict[str, str]:
    """What is trained on what."""
    unit = f"{tokens.tokenizer.unit}s"
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    ways = [name for name in ("kernels", "recompute", "compile") if getattr(flags, name)]
    ways += ["captured"] * is_captured
    return {
        "text": f"{tokens.name}, {tokens.num_files} files",
        unit: f"{short(tokens.training.size)} to train on, {short(tokens.held_out.size)} held out",
        "model": f"{config.num_layers} layers, dim {config.dim}, {short(num_parameters(config))} parameters"
        + describe_experts(config),
        "ranks": ", ".join([f"{disttrain.get_world_size()} on {device_name}", flags.dtype, *ways]),
        "mesh": describe_mesh(flags),
        "steps": f"{flags.steps} of {flags.batch} sequences of {flags.seq} {unit}, learning rate {flags.lr:g}",
        "out": f"{flags.out}",
    }


def num_parameters(config: LlamaConfig) -> int:
    """Of the whole model, of which no rank may have all."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


def describe_experts(config: LlamaConfig) -> str:
    """How many there are in each layer, and how many of them a token has."""
    if not config.num_experts:
        return ""
    shared = ", and a shared one" if config.shared_size else ""
    return f"; {config.num_experts} experts of {config.expert_size} a layer, {config.top_k} for a token{shared}"


def describe_mesh(flags: Namespace) -> str:
    """What lies along which axis, in words."""
    mesh: MeshPlan = flags.mesh
    words = {
        f"pp={mesh.pp}: stages, {flags.microbatches} microbatches by {flags.schedule}": mesh.pp,
        f"replicate={mesh.replicate}: copies": mesh.replicate,
        f"ep={mesh.ep}: each has its experts": mesh.ep,
        f"dp={mesh.dp}: each keeps 1/{mesh.dp * mesh.cp} of the parameters": mesh.dp,
        f"cp={mesh.cp}: sequences are cut": mesh.cp,
        f"tp={mesh.tp}: layers are cut": mesh.tp,
    }
    return "; ".join(text for text, size in words.items() if size > 1) or "none"


def results(flags: Namespace, record: Record, meter: Meter, duration_s: float) -> dict[str, str]:
    """What came of it, and where it lies."""
    losses = [loss for _, loss in record.held_out_losses()]
    facts = {
        "held out": f"{losses[0]:.3f} → {losses[-1]:.3f} nats per token",
        "time": clock(duration_s) + waiting(meter),
        "curve": f"{flags.out / 'loss.png'}",
        "numbers": f"{flags.out / 'loss.csv'}",
    }
    if flags.save_every:
        facts["checkpoint"] = f"{flags.out / CHECKPOINTS}, step {flags.steps}"
        facts["to go on"] = f"--resume --out {flags.out} --steps {2 * flags.steps}"
    return facts if flags.export is None else {**facts, "exported": f"{flags.export}"}


def waiting(meter: Meter) -> str:
    share = meter.waiting_share
    return "" if share is None else f", {share:.0%} of the last steps spent waiting for communication"
