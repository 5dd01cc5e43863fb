"""Cuts a batch of sequences over the ranks of an axis: inputs, targets, positions and documents, all by one plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch

from disttrain.context_parallel.attending import attending
from disttrain.context_parallel.gathering import gathered
from disttrain.context_parallel.positions import positions_in_documents
from disttrain.context_parallel.ranks import alike, check_axis
from disttrain.errors import ArgumentError, MeshError, ShapeError
from disttrain.kernels import Causal, Documents
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.context.planning.cut import plan_cut
from disttrain.kernels.attention.rules import Rule
from disttrain.kernels.choice import wide_dtype
from disttrain.mesh import DeviceMesh
from disttrain.process_group.calls.collectives import all_reduce

NAME: Final = "cut_batch"
IGNORED: Final = -100
"""The target of a position without a loss, as `torch.nn.functional.cross_entropy` has it by default."""


@dataclass(frozen=True, eq=False)
class CutBatch:
    """This rank's positions of a batch of B sequences; s of S positions, which may be none.

    with batch.attention():
        hidden = model(batch.input_ids, position_ids=batch.position_ids)
        loss = batch.mean(linear_cross_entropy(hidden, head.weight, batch.targets, reduction="sum"))
        loss.backward()
    """

    axis: DeviceMesh
    parts: Parts
    way: str | None
    documents: Documents | None
    """The positions of the whole sequence, S of them, that belong together."""

    input_ids: torch.Tensor
    """(B, s)."""
    targets: torch.Tensor
    """(B, s): of each position the next token, -100 behind the last one of a document."""
    position_ids: torch.Tensor
    """(B, s): the place of each in the sequence, or in its document."""
    document_ids: torch.Tensor | None
    """(B, s), where there are documents."""

    num_targets: torch.Tensor
    """Of all ranks of the axis, those that are not -100; no dims."""

    def attention(self) -> AbstractContextManager[None]:
        """A block in which attention looks across the ranks, whichever function a model calls, each position at most
        at its own document. Keep backward within it."""
        return attending(self.parts, self.axis, self.way, self.documents)

    def mean(self, total: torch.Tensor, over: DeviceMesh | None = None) -> torch.Tensor:
        """The sum of this rank's losses as a share of the mean over all ranks' targets: the mean of what the ranks get
        is the loss of the whole batch, and gradients that are averaged over the ranks, as `fully_shard` does, are its.

        Args:  over  the ranks that see different tokens, where there are more of them than on this axis, such as
                     mesh["dp", "cp"]._flatten("dp_cp"); their targets are counted by an all-reduce.
        Without any target it is NaN, and its gradient is zero, as F.cross_entropy has it.
        """
        num_targets, num_ranks = self.num_targets, self.axis.size()
        if over is not None:
            if over.ndim != 1:
                problem = f"`over` has {over.ndim} axes, {over.mesh_dim_names}."
                raise MeshError("CutBatch.mean", problem, "Flatten it.", rank=over.get_rank())
            num_targets, num_ranks = (self.targets != IGNORED).sum(), over.size()
            all_reduce(num_targets, group=over.get_group())
        # Whole numbers divide in fp32, which is too coarse for losses in fp64.
        mean = total * (num_ranks / num_targets.clamp(min=1).to(wide_dtype(total.dtype)))
        return torch.where(num_targets == 0, mean.detach() * torch.nan + 0 * mean, mean)

    def unshard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Gathers a tensor that is cut along `dim` as the batch is, without a gradient, on all ranks. Collective."""
        with torch.no_grad():
            return gathered("CutBatch.unshard", self.axis, self.parts, [tensor], [dim])[0]


def cut_batch(
    axis: DeviceMesh,
    input_ids: torch.Tensor,
    *,
    labels: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    rule: Rule | None = None,
    way: str | None = None,
) -> CutBatch:
    """This rank's part of a batch, by the cut that `plan_cut` chooses.

    The whole is shifted before it is cut: the target of a rank's last position is a token of another rank's.

    Args:    axis          such as mesh["cp"]; all its ranks give the same batch.
             input_ids     (B, S) integers.
             labels        (B, S): each position's own token, or -100, as models of transformers take them; they are
                           shifted here. Default: input_ids.
             targets       (B, S): in place of labels, each position's next token: they are not shifted.
             document_ids  (B, S) or (S,): packed documents, by ids that grow. Positions begin anew in each, none sees
                           another's, and the last of each has no target unless `targets` says so.
             rule          that attention goes by, for the cut; default: Causal(), within documents.
             way           "ring", "gather" or "heads": how attention exchanges keys; default: by cost.
    Returns: CutBatch, on the device of input_ids.
    Raises:  on all ranks: ArgumentError and ShapeError for tensors that don't fit, RankMismatchError on the other ranks
             and where shapes differ between ranks.
    Collective: a few bytes on the host.
    """
    check_axis(NAME, axis)

    def plan() -> tuple[tuple[Documents | None, Parts], list[int]]:
        _check(input_ids, labels, targets, document_ids, rule, axis.get_rank())
        documents = None if document_ids is None else Documents(document_ids)
        default = Causal() if documents is None else Causal() & documents
        parts = plan_cut(default if rule is None else rule, input_ids.shape[1], axis.size()).parts
        given = (labels, targets, document_ids)
        return (documents, parts), [*input_ids.shape, *(tensor is not None for tensor in given)]

    names = ("the number of sequences", "their length", "labels given", "targets given", "documents given")
    documents, parts = alike(NAME, axis, names, plan)
    length = input_ids.shape[1]
    if targets is None:
        targets = _shifted(input_ids if labels is None else labels, document_ids)
    rank = axis.get_local_rank()

    def part(whole: torch.Tensor) -> torch.Tensor:
        return parts.take(whole.expand(len(input_ids), length), rank, 1).contiguous()

    positions = positions_in_documents(length, document_ids, input_ids.device)
    return CutBatch(
        axis,
        parts,
        way,
        documents,
        part(input_ids),
        part(targets),
        part(positions),
        None if document_ids is None else part(document_ids),
        (targets != IGNORED).sum(),
    )


def _check(input_ids: object, labels: object, targets: object, document_ids: object, rule: object, rank: int) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ShapeError(NAME, f"input_ids is {shape}.", "Give a tensor (B, S).", rank=rank)
    if labels is not None and targets is not None:
        raise ArgumentError(NAME, "labels and targets are given.", "Give one of them.", rank=rank)
    if rule is not None and not isinstance(rule, Rule):
        problem = f"rule is a {type(rule).__name__}."
        raise ArgumentError(NAME, problem, "Give one of disttrain.kernels, such as Causal().", rank=rank)
    for name, tensor in (("labels", labels), ("targets", targets), ("document_ids", document_ids)):
        if tensor is None:
            continue
        shapes = [tuple(input_ids.shape), *([tuple(input_ids.shape[1:])] if name == "document_ids" else [])]
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) not in shapes:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ShapeError(NAME, f"{name} is {shape}.", f"Give {' or '.join(map(str, shapes))}.", rank=rank)
        if tensor.device != input_ids.device:
            problem = f"{name} is on {tensor.device}, input_ids on {input_ids.device}."
            raise ShapeError(NAME, problem, "Put them on one device.", rank=rank)


def _shifted(labels: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
    """The next label of each position, none behind the last of a sequence or document."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        is_last = document_ids[..., 1:] != document_ids[..., :-1]
        targets[:, :-1].masked_fill_(is_last.expand_as(targets[:, :-1]), IGNORED)
    return targets
