"""plan_for: a proposal how to cut a model of common decoder blocks, which the user reads, edits and applies.

A module whose own linear layers first widen and then bring back the hidden size is cut by columns, then by rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from disttrain.dtensor import Replicate, Shard
from disttrain.errors import ShardingError
from disttrain.tp.attributes import DivideAttributes
from disttrain.tp.heads import Together
from disttrain.tp.layers.linears import Matrix, matrix_of
from disttrain.tp.layers.sequence import SequenceParallel
from disttrain.tp.modules import check_module
from disttrain.tp.planning.heads import Heads, has_embedding_of_heads
from disttrain.tp.planning.table import Entry, ParallelPlan
from disttrain.tp.prepare import PrepareModuleInput
from disttrain.tp.replicated import ReplicatedParallel
from disttrain.tp.styles import ColwiseParallel, ParallelStyle, RowwiseParallel

_NORMS = ("RMSNorm", "LayerNorm")
_OUTPUTS = re.compile(r"(^|_)(o|out|output|proj|dense|wo)(_|$)")
"""Names of the last layer of an attention, for when the sizes don't say which one it is."""


def plan_for(
    model: nn.Module,
    *,
    sequence_parallel: bool | None = None,
    loss_parallel: bool = False,
    head_dim: int | None = None,
) -> ParallelPlan:
    """A plan that cuts `model`: a dict for parallelize_module, which prints as a table.

    Known are embeddings, norms, and modules that hold the linear layers of an attention or an MLP, gated or not, with
    fewer heads for keys and values, or fused (query, key and value in one, gate and up in one); by their sizes, and by
    their names where all are square; and disttrain.experts' layers, which are cut along the hidden dim of each expert,
    with their routers whole. Sizes alone are looked at: the model may be on the meta device.

    Args:   sequence_parallel  cut activations between layers along dim 1. Default: yes, but for models of transformers,
                               which take the length of the sequence from them.
            loss_parallel      leave the logits cut, for vocab_parallel_cross_entropy; else they are gathered.
            head_dim           where the model does not say it.
    Raises: ShardingError when no such module is found, one holds an attention and an MLP, or an attention does not say
            its head_dim.
    """
    check_module("plan_for", model)
    is_foreign = any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)
    cuts_sequence = not is_foreign if sequence_parallel is None else sequence_parallel
    dim = _hidden_size(model)
    entries: list[Entry] = []
    inside: dict[str, Heads | None] = {}
    counting: set[type[nn.Module]] = set()
    of_experts = {name for name, module in model.named_modules() if _is_of_experts(model, name, module, dim)}
    for name, module in model.named_modules():
        if name in of_experts:
            entries += _cut_experts(name, module, dim, cuts_sequence=cuts_sequence)
        if name in of_experts or _is_inside(name, of_experts):
            continue
        pair = _pair_of(module, dim)
        if pair is not None:
            heads = _heads_of(name, module, pair, head_dim or _head_dim(model)) if pair.is_attention else None
            if heads is not None and has_embedding_of_heads(module, heads.num):
                counting.add(type(module))
            entries += _cut_pair(name, module, pair, cuts_sequence, heads, counts=type(module) in counting)
            inside[name] = heads
        elif _is_inside(name, inside):
            heads = inside[next(owner for owner in inside if _is_inside(name, {owner}))]
            style = _style_inside(name, module, heads)
            if style is not None:
                entries.append(Entry(name, style, module, dim))
        elif isinstance(module, nn.Embedding):
            output = Shard(1) if cuts_sequence else Replicate()
            entries.append(Entry(name, RowwiseParallel(output_layouts=output), module, dim))
        elif _is_norm(module) and cuts_sequence:
            entries.append(Entry(name, SequenceParallel(use_local_output=True), module, dim))
        elif matrix_of(module) is not None and not _has_owner(name, model, dim):
            entries.append(Entry(name, _head_style(cuts_sequence, loss_parallel), module, dim))
    if not (inside or of_experts):
        raise ShardingError(
            "plan_for",
            f"{type(model).__name__} has no module whose own linear layers widen the hidden size and bring it back.",
            "Write the plan by hand: a dict from names of modules to styles.",
        )
    return ParallelPlan(_joined(entries))


@dataclass(frozen=True)
class _Pair:
    """Linear layers by name: those that are cut by columns, and the one cut by rows."""

    columns: tuple[str, ...]
    row: str
    num_blocks: int
    is_attention: bool


def _hidden_size(model: nn.Module) -> int:
    """The commonest size of a norm, or of an embedding's vectors."""
    sizes = [
        module.weight.shape[0]
        for module in model.modules()
        if _is_norm(module) and isinstance(module.weight, torch.Tensor)
    ] or [module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)]
    # Norms of single heads are as many as those of the whole, and smaller.
    return max(set(sizes), key=lambda size: (sizes.count(size), size)) if sizes else 0


def _pair_of(module: nn.Module, dim: int) -> _Pair | None:
    layers = dict(_own_layers(module))
    sizes = {name: _sizes(module.get_submodule(name), matrix) for name, matrix in layers.items()}
    if len(layers) < 2:
        return None
    wide = [name for name, (num_in, _) in sizes.items() if num_in == dim]
    back = [name for name, (num_in, num_out) in sizes.items() if num_out == dim]
    narrowing = [name for name in back if name not in wide]
    named = [name for name in back if _OUTPUTS.search(name)] or back
    row = narrowing[-1] if narrowing else named[-1] if named else None
    columns = tuple(name for name in wide if name != row)
    if row is None or not columns or len(columns) + 1 != len(layers):
        return None
    widths = sorted(sizes[name][1] for name in columns)
    if _are_of_two(widths, sizes[row][0]):
        raise ShardingError(
            "plan_for",
            f"a {type(module).__name__} holds {', '.join(layers)}, which are those of an attention and an MLP in one.",
            "Make either a module of its own, or write the plan by hand: a dict from names of modules to styles.",
        )
    widest = widths[-1]
    num_blocks = widest // sizes[row][0] if len(columns) == 1 else 1
    if num_blocks < 1 or (len(columns) == 1 and widest != num_blocks * sizes[row][0]):
        return None
    is_attention = len(columns) == 3 or (len(columns) == 1 and num_blocks == 3)
    return _Pair(columns, row, num_blocks, is_attention)


def _are_of_two(widths: list[int], inner_size: int) -> bool:
    """True where layers of these widths, which rise, before one that takes `inner_size`, are more than an attention's
    or an MLP's: of these the widest is as wide as that, and an attention's keys are as wide as its values."""
    if len(widths) > 2 and widths[0] != widths[1]:
        return True
    return len(widths) > 4 or (len(widths) > 1 and widths[-1] != inner_size)


def _heads_of(name: str, module: nn.Module, pair: _Pair, head_dim: int | None) -> Heads:
    own_head_dim = _head_dim(module) or head_dim
    if own_head_dim is None:
        raise ShardingError(
            "plan_for",
            f"{name} looks like an attention, and neither it nor the model's config says its head_dim.",
            "Give plan_for(head_dim=...).",
        )
    sizes = {
        part: _sizes(layer, matrix_of(layer))
        for part, layer in module.named_children()
        if part in (*pair.columns, pair.row)
    }
    widths = [sizes[column][1] // pair.num_blocks // own_head_dim for column in pair.columns]
    return Heads(max(widths), min(widths), own_head_dim, sizes[pair.row][1])


def _style_inside(name: str, module: nn.Module, heads: Heads | None) -> ParallelStyle | None:
    """The style of what lies in an attention or an MLP beside its linear layers."""
    if _is_norm(module) and not (heads is not None and heads.check_norm(name, module)):
        # Of single heads, such as those of queries and keys: each rank has its own heads.
        return SequenceParallel(use_local_output=True)
    return None if heads is None else heads.of_part(name, module)


def _cut_pair(
    name: str, module: nn.Module, pair: _Pair, cuts_sequence: bool, heads: Heads | None, *, counts: bool
) -> list[Entry]:
    """`counts`: the module's forward takes the number of its heads from an attribute."""
    own_head_dim = None if heads is None else heads.head_dim
    prefix = f"{name}." if name else ""
    dim = _sizes(module.get_submodule(pair.row), matrix_of(module.get_submodule(pair.row)))[1]
    styles: list[ParallelStyle] = []
    if cuts_sequence:
        styles.append(
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), shared_by=list(pair.columns))
        )
    elif heads is not None and getattr(module, "split_size", None) == dim:
        styles.append(DivideAttributes("split_size"))
    if heads is not None:
        styles += heads.own_styles(name, module)
        if counts and (counted := heads.counted(module)) is not None:
            styles.append(counted)
        if (grouped := heads.grouped(module)) is not None:
            styles.append(grouped)
    entries = []
    if styles:
        entries.append(Entry(name, styles[0] if len(styles) == 1 else Together(*styles), module, dim))
    for column in pair.columns:
        columns = ColwiseParallel(head_dim=own_head_dim, num_blocks=pair.num_blocks)
        entries.append(Entry(prefix + column, columns, module.get_submodule(column), dim, is_shared=cuts_sequence))
    rows = RowwiseParallel(output_layouts=Shard(1) if cuts_sequence else Replicate())
    entries.append(Entry(prefix + pair.row, rows, module.get_submodule(pair.row), dim))
    return entries


def _head_style(cuts_sequence: bool, loss_parallel: bool) -> ColwiseParallel:
    return ColwiseParallel(
        input_layouts=Shard(1) if cuts_sequence else Replicate(), output_layouts=None if loss_parallel else Replicate()
    )


def _own_layers(module: nn.Module) -> Iterator[tuple[str, Matrix]]:
    for name, child in module.named_children():
        matrix = matrix_of(child)
        if matrix is not None:
            yield name, matrix


def _sizes(layer: nn.Module, matrix: Matrix | None) -> tuple[int, int]:
    """Inputs and outputs."""
    assert matrix is not None
    weight: Any = layer.weight
    return weight.shape[matrix.in_dim], weight.shape[matrix.out_dim]


def _head_dim(module: nn.Module) -> int | None:
    """The size of a module's heads, by its attributes or its config's; None where these do not say."""
    for source in (module, getattr(module, "config", None)):
        for name in ("head_dim", "attention_head_size"):
            size_of_head = getattr(source, name, None)
            if isinstance(size_of_head, int):
                return size_of_head
        for name, size in (("num_attention_heads", "hidden_size"), ("n_head", "n_embd"), ("num_heads", "embed_dim")):
            heads, width = getattr(source, name, None), getattr(source, size, None)
            if isinstance(heads, int) and isinstance(width, int):
                return width // heads
    return None


def _is_of_experts(model: nn.Module, name: str, module: nn.Module, dim: int) -> bool:
    """True for a layer of experts, and for what stands beside one and is no MLP that all tokens pass: a router."""
    if hasattr(module, "style_along_hidden"):
        return True
    parent = model.get_submodule(name.rpartition(".")[0])
    is_beside = bool(name) and any(hasattr(child, "style_along_hidden") for child in parent.children())
    return is_beside and all(_pair_of(part, dim) is None for part in module.modules())


def _cut_experts(name: str, module: nn.Module, dim: int, *, cuts_sequence: bool) -> list[Entry]:
    style: ParallelStyle | None = None
    if hasattr(module, "style_along_hidden"):
        style = cast(Any, module).style_along_hidden(cuts_tokens=cuts_sequence)
    elif cuts_sequence and any(True for _ in module.parameters()):
        # Each rank needs all of it, for its own tokens.
        style = ReplicatedParallel()
    return [] if style is None else [Entry(name, style, module, dim)]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_NORMS) and any(True for _ in module.parameters(recurse=False))


def _is_inside(name: str, owners: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in owners for length in range(len(parts)))


def _has_owner(name: str, model: nn.Module, dim: int) -> bool:
    """True where the module that holds this layer is a pair's."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return _pair_of(parent, dim) is not None


def _joined(entries: Sequence[Entry]) -> list[Entry]:
    """One entry for all repetitions of a block: numbers in their names become wildcards."""
    alike: dict[str, list[Entry]] = {}
    for entry in entries:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", entry.name)
        alike.setdefault(pattern, []).append(entry)
    joined: list[Entry] = []
    for pattern, those in alike.items():
        if len({repr(entry.style) for entry in those}) == 1:
            joined.append(dataclasses.replace(those[0], name=pattern, count=len(those)))
        else:
            # The pattern would mean the others too.
            joined += those
    return joined
