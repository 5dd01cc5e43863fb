"""Tensor parallel: modules cut along a mesh axis, with the names of torch.distributed.tensor.parallel."""

from __future__ import annotations

from disttrain.lazy_names import answering
from disttrain.tp.attributes import DivideAttributes
from disttrain.tp.ddp import _pre_dp_module_transform as _pre_dp_module_transform
from disttrain.tp.heads import HeadParallel
from disttrain.tp.layers.sequence import SequenceParallel
from disttrain.tp.loss.context import loss_parallel
from disttrain.tp.loss.vocab_parallel import vocab_parallel_cross_entropy
from disttrain.tp.parallelize import parallelize_module
from disttrain.tp.planning.plan_for import plan_for
from disttrain.tp.planning.table import ParallelPlan
from disttrain.tp.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from disttrain.tp.randomness import own_randomness
from disttrain.tp.replicated import ReplicatedParallel
from disttrain.tp.styles import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "DivideAttributes",
    "HeadParallel",
    "ParallelPlan",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicatedParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "own_randomness",
    "parallelize_module",
    "plan_for",
    "vocab_parallel_cross_entropy",
]

_OF_TORCH = ("_pre_dp_module_transform",)
"""torch's private names that programs call."""

__getattr__ = answering(__name__)
