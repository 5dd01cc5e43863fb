"""One model under one parallelism, trained in one of several ways: by torch's library or ours, with kernels or without.

fsdp: parameters in fp32 are sharded over all ranks and computed with in bf16. tp: a model in bf16 is cut over all
ranks, activations along the sequence between the layers. 2d: cut over pairs of neighbours, sharded over the pairs.
hsdp: sharded over pairs of neighbours, each of which has a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from models.mixture import OurMixture, TorchMixture
from models.model import Llama, Sizes
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import parallel as torch_tp
from torch.nn.attention import SDPBackend, sdpa_kernel

import disttrain
from disttrain import dtensor, fsdp2, kernels, tp
from disttrain.compiling import compile_blocks

PARALLELISMS = ("fsdp", "tp", "2d", "hsdp")
MESHES = {"2d": ("dp", "tp"), "hsdp": ("copies", "shards")}
"""Those of pairs of neighbours, outer axis first."""
ATTENTIONS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LOGITS_BYTES = 2 << 30
"""What a block of logits may take with kernels; all of them take twice as much."""
SEED = 1


@dataclass(frozen=True)
class Way:
    """How a model is trained. `attention` None: what torch chooses."""

    is_ours: bool
    is_compiled: bool = True
    has_kernels: bool = False
    """Of the loss and the optimizer, and with `in_blocks` within the model."""
    in_blocks: bool = True
    has_parallel_loss: bool = True
    """torch's loss_parallel, in place of a loss over gathered logits, where classes are cut."""
    attention: str | None = None
    float8: Literal["tensorwise", "rowwise"] | None = None
    """The recipe of linear layers that multiply in float8; None: they multiply as ever."""
    computes_in: torch.dtype = torch.bfloat16
    """Also what parameters are kept in, where they are cut alone."""
    keeps_in: torch.dtype = torch.float32
    """What parameters are kept in that are sharded."""
    shard_options: Mapping[str, Any] = field(default_factory=dict)
    """More of fully_shard's arguments."""
    has_averages: bool = True
    """AdamW's; without them it is SGD that steps."""
    is_capturable: bool = False
    """Of torch's optimizer: a CUDA graph may hold its step."""


WAYS = {
    "torch fp32": Way(False, is_compiled=False, computes_in=torch.float32),
    "torch": Way(False, is_compiled=False),
    "torch compiled": Way(False),
    "torch compiled, gathered logits": Way(False, has_parallel_loss=False),
    "torch compiled, cudnn": Way(False, attention="cudnn"),
    "ours": Way(True, is_compiled=False),
    "ours compiled": Way(True),
    "kernels": Way(True, is_compiled=False, has_kernels=True),
    "kernels compiled": Way(True, has_kernels=True),
    "kernels around compiled": Way(True, has_kernels=True, in_blocks=False),
    "float8 compiled": Way(True, float8="tensorwise"),
    "kernels compiled, float8": Way(True, has_kernels=True, float8="tensorwise"),
    "kernels compiled, float8 rowwise": Way(True, has_kernels=True, float8="rowwise"),
    "kernels compiled, cudnn": Way(True, has_kernels=True, attention="cudnn"),
    "kernels compiled, flash": Way(True, has_kernels=True, attention="flash"),
}


class Case:
    """A model, its optimizer, and a step of both. Collective."""

    def __init__(self, parallelism: str, way: Way, sizes: Sizes, device: str, learning_rate: float) -> None:
        self.way = way
        with torch.device("meta"):
            model = Llama(sizes, _mixture(way)) if sizes.experts else Llama(sizes)
        model.to(way.computes_in if parallelism == "tp" else way.keeps_in)
        self.axis = _parallelize(model, parallelism, way, device)
        model.to_empty(device=device)
        # Where there are copies, they are equal.
        model.init(SEED + disttrain.get_rank() % (2 if parallelism == "hsdp" else disttrain.get_world_size()))
        self.model = model
        if way.has_kernels:
            # Averages are kept as torch's optimizer keeps them: as the parameters are.
            self.optimizer: torch.optim.Optimizer = kernels.AdamW(
                model.parameters(),
                lr=learning_rate,
                keep_master=False,
                state_dtype=next(model.parameters()).dtype,
            )
            if parallelism != "tp" and way.keeps_in != way.computes_in:
                model.round_in_step(self.optimizer)
        else:
            kind: Any = torch.optim.AdamW if way.has_averages else torch.optim.SGD
            options = {"capturable": True} if way.is_capturable else {}
            self.optimizer = kind(model.parameters(), lr=learning_rate, fused=True, **options)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Seconds of a training step on this rank, from a common start, and the loss."""
        synchronize()
        disttrain.barrier()
        begin = time.perf_counter()
        loss = self.whole_step(tokens, targets)
        synchronize()
        return time.perf_counter() - begin, loss

    def whole_step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A training step, which waits for nothing; returns the loss."""
        with _attention(self.way):
            loss = self._loss_and_backward(tokens, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss_and_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model, way = self.model, self.way
        if self.axis is not None and way.is_ours:
            vocab_size = model.sizes.vocab
            loss = tp.vocab_parallel_cross_entropy(model(tokens), targets, self.axis, vocab_size=vocab_size)
            loss.backward()
            return loss
        if way.has_kernels:
            with kernels.loss_from_head(model.head, targets, block_bytes=LOGITS_BYTES):
                loss = model(tokens)
            loss.backward()
            return loss
        is_parallel = self.axis is not None and way.has_parallel_loss
        with torch_tp.loss_parallel() if is_parallel else nullcontext():
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
            loss.backward()
        return loss.full_tensor() if isinstance(loss, torch_tensor.DTensor) else loss

    @property
    def resting_bytes(self) -> int:
        """What parameters and the optimizer's state hold between steps."""
        state = [value for own in self.optimizer.state.values() for value in own.values() if value.ndim]
        return sum(local(tensor).nbytes for tensor in (*self.model.parameters(), *state))


def ranks_per_batch(parallelism: str) -> int:
    """How many neighbours share a batch."""
    return {"tp": disttrain.get_world_size(), "2d": 2}.get(parallelism, 1)


def local(tensor: Any) -> Tensor:
    """This rank's part of either library's DTensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _attention(way: Way) -> AbstractContextManager[Any]:
    return nullcontext() if way.attention is None else sdpa_kernel(ATTENTIONS[way.attention])


def _parallelize(model: Llama, parallelism: str, way: Way, device: str) -> Any:
    """Cut, compile and shard; returns the axis that cuts classes, where there is one."""
    num_ranks = disttrain.get_world_size()
    shape = (num_ranks // 2, 2) if parallelism in MESHES else (num_ranks,)
    names = MESHES.get(parallelism, (parallelism,))
    make: Callable[..., Any] = disttrain.init_device_mesh if way.is_ours else torch_mesh
    mesh = make(device, shape, mesh_dim_names=names)
    axis = mesh["tp"] if "tp" in names else None
    if way.float8 is not None:
        kernels.use_float8(model, way.float8, report=lambda line: print(line) if not disttrain.get_rank() else None)
    if way.has_kernels and way.in_blocks:
        kernels.use_kernels(model, report=lambda line: print(line) if not disttrain.get_rank() else None)
    if axis is not None:
        _cut(model, axis, way)
    if way.is_compiled and way.is_ours:
        compile_blocks(model)
    elif way.is_compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    if parallelism != "tp":
        _shard(model, mesh["dp"] if parallelism == "2d" else mesh, way)
    return axis


def _mixture(way: Way) -> Callable[[Sizes], nn.Module]:
    kind = OurMixture if way.is_ours else TorchMixture
    return lambda sizes: kind(sizes.dim, sizes.ffn, sizes.experts, sizes.top_k)


def _cut(model: nn.Module, axis: Any, way: Way) -> None:
    """By one plan: torch's names are ours."""
    styles, placements = (tp, dtensor) if way.is_ours else (torch_tp, torch_tensor)
    shard, whole = placements.Shard(1), placements.Replicate()
    if way.is_ours:
        head: dict[str, Any] = {}
    elif way.has_parallel_loss:
        head = {"use_local_output": False}
    else:
        head = {"output_layouts": whole}
    attention = {"input_layouts": (shard, None, None), "desired_input_layouts": (whole, None, None)}
    plan: dict[str, Any] = {
        "embedding": styles.RowwiseParallel(input_layouts=whole, output_layouts=shard),
        "norm": styles.SequenceParallel(),
        "head": styles.ColwiseParallel(input_layouts=shard, **head),
        "blocks.*.attention_norm": styles.SequenceParallel(),
        "blocks.*.attention": styles.PrepareModuleInput(**attention),
        "blocks.*.attention.output": styles.RowwiseParallel(output_layouts=shard),
        "blocks.*.feed_forward_norm": styles.SequenceParallel(),
        "blocks.*.feed_forward": styles.PrepareModuleInput(input_layouts=shard, desired_input_layouts=whole),
        "blocks.*.feed_forward.down": styles.RowwiseParallel(output_layouts=shard),
    }
    for name in ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
        plan[f"blocks.*.{name}"] = styles.ColwiseParallel()
    styles.parallelize_module(model, axis, plan)


def _shard(model: Llama, mesh: Any, way: Way) -> None:
    library: Any = fsdp2 if way.is_ours else torch_fsdp
    policy = library.MixedPrecisionPolicy(param_dtype=way.computes_in, reduce_dtype=torch.float32)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, mp_policy=policy, **way.shard_options)
    library.fully_shard(model, mesh=mesh, mp_policy=policy, **way.shard_options)
