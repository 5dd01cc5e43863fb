"""A model on its ranks: cut into stages, each stage's layers cut, then sharded. No rank ever holds the whole.

The order matters. Stages first, since each is a module of its own; layers (tp) and experts (ep) before parameters are
sharded (dp, cp); kernels take the place of layers that are cut already; what is compiled comes last, as hooks stay
outside of graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import disttrain
from disttrain import kernels, tp
from disttrain.compiling import compile_blocks
from disttrain.dtensor import DTensor, Shard
from disttrain.experts import shard_experts
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.pipelining import PipelineStage, Schedule, split_blocks
from llama.config import LlamaConfig
from llama.meshes import token_axis
from llama.model import Axes, Block, Llama

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Ways:
    """How to compute what is the same whichever way."""

    dtype: str = "fp32"
    kernels: bool = False
    recompute: bool = False
    compile: bool = False
    capture: bool = False


@dataclass(frozen=True)
class Placed:
    """`model` has the whole's names, and the parameters that are this rank's; `stages` are a pipeline's, else none."""

    model: Llama
    stages: tuple[PipelineStage, ...] = ()


def place(
    config: LlamaConfig, mesh: disttrain.DeviceMesh, schedule: Schedule | None, ways: Ways, *, length: int, seed: int
) -> Placed:
    """Make the model, all of it on its ranks, with parameters that follow from the seed alone, on any mesh.

    `length`: the longest sequence that will come.
    """
    device = mesh.world.device
    with torch.device("meta"):
        model = Llama(config, Axes(token_axis(mesh), mesh["ep"])).to(
            torch.float64 if ways.dtype == "fp64" else torch.float32
        )
    model.recomputes, model.length = ways.recompute, length
    if schedule is None:
        _fit_out(model, config, mesh, ways)
        model.to_empty(device=device)
        model.init(seed)
        return Placed(model)
    split = split_blocks(model, schedule.num_stages)
    own = schedule.placement.stages[mesh.get_local_rank("pp")]
    for index in own:
        _fit_out(split.stages[index], config, mesh, ways)
        split.stages[index].to_empty(device=device)
    _let_go_of_others(model, [split.stages[index] for index in own])
    model.init(seed)
    return Placed(model, tuple(split.build_stage(index, device, mesh["pp"].get_group()) for index in own))


def _fit_out(module: nn.Module, config: LlamaConfig, mesh: disttrain.DeviceMesh, ways: Ways) -> None:
    """The whole model, or one stage of it."""
    if mesh["tp"].size() > 1:
        plan = tp.plan_for(module, loss_parallel=True, head_dim=config.head_size)
        tp.parallelize_module(module, mesh["tp"], plan)
    if config.num_experts:
        # A graph of the whole step cannot wait for the host to read how many rows go where.
        exchange = "padded" if ways.capture else "auto"
        shard_experts(module, mesh["ep"], exchange=exchange, src_data_rank=None)
    if ways.kernels:
        kernels.use_kernels(module, report=lambda _: None)
    shards = mesh["replicate", "shards"] if mesh["replicate"].size() > 1 else mesh["shards"]
    # Gradients are averaged in fp32; the rotation's angles stay in it too, so inputs are not cast.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if ways.dtype == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in module.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=shards, mp_policy=policy)
    fully_shard(module, mesh=shards, mp_policy=policy, shard_placement_fn=_across_uneven)
    if ways.compile:
        # Ranks exchange keys between graphs.
        compile_blocks(module, Block, fullgraph=mesh["cp"].size() == 1)


def _across_uneven(parameter: nn.Parameter) -> Shard | None:
    """A vocabulary that tp cuts into uneven parts is not cut again: its matrix is, along the other dim."""
    if isinstance(parameter, DTensor) and parameter.shape[0] % parameter.device_mesh.size():
        return Shard(1)
    return None


def _let_go_of_others(model: Llama, stages: list[nn.Module]) -> None:
    """Leave in the whole model only what it shares with this rank's stages, so that its names are those of a save."""
    own = {part for stage in stages for part in stage.modules()}
    ends = {"embedding": model.head, "head": model.embedding} if model.config.is_tied else {}
    for parent in (model, model.blocks):
        for name, part in list(parent.named_children()):
            if part not in own and part is not model.blocks:
                other_end = ends.get(name)
                parent.add_module(name, _Named(other_end) if other_end in own else nn.Identity())


class _Named(nn.Module):
    """Gives a rank's copy of the tied matrix the other end's name as well, as in a model that is whole."""

    def __init__(self, other_end: nn.Module) -> None:
        super().__init__()
        self.weight = other_end.weight
