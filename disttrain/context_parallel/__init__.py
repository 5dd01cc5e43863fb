"""Context parallel: sequences whose positions are cut over the ranks of a mesh axis, so that long ones fit.

Each rank has a part of the positions of every sequence, from the embedding to the loss. Attention alone looks beyond it
(`disttrain.kernels.attention`); all else is done at each position by itself.
"""

from __future__ import annotations

from disttrain.context_parallel.batch import CutBatch, cut_batch
from disttrain.context_parallel.context import context_parallel, context_parallel_unshard, set_rotate_method
from disttrain.context_parallel.positions import own_positions
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.context.planning.cut import CutPlan, plan_cut
from disttrain.lazy_names import answering

__all__ = [
    "CutBatch",
    "CutPlan",
    "Parts",
    "context_parallel",
    "context_parallel_unshard",
    "cut_batch",
    "own_positions",
    "plan_cut",
    "set_rotate_method",
]

__getattr__ = answering(__name__)
