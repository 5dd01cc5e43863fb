"""Fused kernels for a training step: custom operators, each with a reference by torch's operators that judges it.

On GPUs they are Triton's. On CPUs, and for arguments that Triton's don't take, torch's operators compute the same
(`choice.py`). Each operator has shapes, a gradient and, where possible, rules for torch.vmap and DTensors.
"""

from __future__ import annotations

from disttrain.kernels.attention.choice import AttentionChoice, attention_choices
from disttrain.kernels.attention.operator import attention
from disttrain.kernels.attention.rules import Alibi, Causal, Documents, Prefix, SlidingWindow, SoftCap
from disttrain.kernels.cross_entropy.head import loss_from_head
from disttrain.kernels.cross_entropy.linear import linear_cross_entropy
from disttrain.kernels.float8.linear import Float8Linear, float8_linear
from disttrain.kernels.float8.use import use_float8
from disttrain.kernels.float8.weight import Float8Weight
from disttrain.kernels.glu.operator import geglu, swiglu
from disttrain.kernels.norms.operator import layer_norm, rms_norm
from disttrain.kernels.optimizers.fused import SGD, AdamW, FusedOptimizer, Lion
from disttrain.kernels.rotary.operator import rotate, rotate_
from disttrain.kernels.sparse24.training import Sparse24, SparseLinear, use_sparse24
from disttrain.kernels.use import Replaced, use_kernels

__all__ = [
    "AdamW",
    "Alibi",
    "AttentionChoice",
    "Causal",
    "Documents",
    "Float8Linear",
    "Float8Weight",
    "FusedOptimizer",
    "Lion",
    "Prefix",
    "Replaced",
    "SGD",
    "SlidingWindow",
    "SoftCap",
    "Sparse24",
    "SparseLinear",
    "attention",
    "attention_choices",
    "float8_linear",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "loss_from_head",
    "rms_norm",
    "rotate",
    "rotate_",
    "swiglu",
    "use_float8",
    "use_kernels",
    "use_sparse24",
]
