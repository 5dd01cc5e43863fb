"""A model's tensors under the names of Hugging Face's files, where an expert may be a tensor of its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.expert_layer import ExpertLayer, local_part

_NAME = "pretrained_state_dict"


class _Merge(NamedTuple):
    """In files, a stacked parameter whose name ends so is one tensor for each of `sources` and expert."""

    suffix: str
    sources: tuple[str, ...]


def pretrained_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Names the tensors of a model of transformers as its files do: experts that the files have apart are parts of this
    rank's stacked parameters, without a copy.

        load(pretrained_state_dict(model), storage_reader=HuggingFaceStorageReader(folder))
        save(pretrained_state_dict(model), storage_writer=HuggingFaceStorageWriter(folder))

    A load fills the parameters, and each rank reads its own experts alone; a save writes all ranks' experts, and
    `from_pretrained` reads it. The names are those of transformers' own conversions, of which experts that are stacked
    and names that are others are known. Other models keep their names.

    Raises: ShardingError for a parameter that transformers converts in another way, or whose experts are cut by
            something other than `shard_experts`.
    """
    merges, renamings = _conversions(model)
    layers = {prefix: part for prefix, part in model.named_modules() if isinstance(part, ExpertLayer)}
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        # A tied parameter stands in the files once, by its first name.
        if id(value) not in seen and isinstance(value, torch.Tensor):
            seen.add(id(value))
            merge = next((candidate for candidate in merges if name.endswith(candidate.suffix)), None)
            parts = {name: value} if merge is None else dict(_apart(name, value, merge, layers))
            state.update((_renamed(key, renamings), part.detach()) for key, part in parts.items())
    return state


def _apart(
    name: str, value: torch.Tensor, merge: _Merge, layers: dict[str, ExpertLayer]
) -> Iterator[tuple[str, torch.Tensor]]:
    experts = range(len(value))
    if isinstance(value, DTensor):
        layer = layers.get(name.rpartition(".")[0])
        if layer is None or value.device_mesh.ndim != 1 or value.placements[0].cut_dim != 0:
            raise ShardingError(
                _NAME,
                f"parameter {name} lies as {value._spec.layout}, and files have its experts apart.",
                "Call it after use_experts and shard_experts, and before fully_shard.",
                rank=value.device_mesh.get_rank(),
            )
        mesh = value.device_mesh
        experts = ExpertCut(layer.count_experts(), mesh.size()).experts_of(mesh.get_local_rank())
    begin = name[: len(name) - len(merge.suffix)]
    for index, expert in zip(experts, local_part(value.detach()), strict=True):
        for source, part in zip(merge.sources, expert.chunk(len(merge.sources)), strict=True):
            yield begin + source.replace("*", str(index)), part


def _conversions(model: nn.Module) -> tuple[list[_Merge], list[Any]]:
    """The changes that transformers makes to names and tensors when it loads the model; nothing for other models."""
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        return [], []
    # Here, since a model of transformers has it loaded already, and others need not have it.
    mapping, loading = (import_module(f"transformers.{name}") for name in ("conversion_mapping", "core_model_loading"))
    merges, renamings = [], []
    for conversion in mapping.get_model_conversion_mapping(model, add_legacy=False):
        if isinstance(conversion, loading.PrefixChange):
            continue
        if not isinstance(conversion, loading.WeightConverter):
            renamings.append(conversion)
            continue
        target, *more = conversion.target_patterns
        kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in conversion.operations]
        names = [key for key in model.state_dict() if key.endswith(target)]
        if kinds not in (_MERGED, _MERGED[:1]) or more:
            if names:
                how = ", ".join(kind for kind, _ in kinds)
                problem = f"transformers makes parameter {names[0]} of its files' tensors by {how}."
                raise ShardingError(_NAME, problem, "Load it by from_pretrained, before shard_experts.")
            continue
        merges.append(_Merge(target, tuple(conversion.source_patterns)))
    return merges, [each.reverse_transform() for each in renamings[::-1]]


_MERGED = [("MergeModulelist", 0), ("Concatenate", 1)]


def _renamed(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
