"""Gives models of transformers their positions while a block runs, and refuses those that see others in other ways.

A model that is given no positions counts from 0, which is right on the first rank at most. Those that take
`position_ids` get this rank's, and so do embeddings of positions in models that take none. Layers of convolutions, a
second sequence, and caches of keys would be of this rank's positions alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from inspect import signature
from typing import Any, Final

import torch
from torch import nn

from disttrain.context_parallel.faults import refuse
from disttrain.context_parallel.positions import positions_in_block
from disttrain.context_parallel.unmade import NAME, WITHOUT
from disttrain.kernels.attention.context.agreement import num_agreed
from disttrain.kernels.attention.context.current import Cut, current_cut

_POSITIONS: Final = "position_ids"
_CACHES: Final = ("cache", "past_key_values")
_LOCAL: Final = threading.local()


@contextmanager
def calling(model: Any) -> Iterator[None]:
    """Has calls of `model`, the class of all models, find their positions, and refuses those that attend to no other
    rank's."""
    replaced = vars(model).get("__call__")

    def before(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked for at each call: torch.fx has its own there while it traces.
        return (super(model, self).__call__ if replaced is None else partial(replaced, self))(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cut = current_cut()
        if cut is None or cut.axis.size() == 1:
            return before(self, *args, **kwargs)
        given = _given(self, args, kwargs)
        positions = _positions(self, given, cut)
        if positions is not None:
            index = _parameters(self).index(_POSITIONS)
            args, behind = args[:index], args[index + 1 :]
            kwargs |= dict(zip(_parameters(self)[index + 1 :], behind, strict=False)) | {_POSITIONS: positions}
        # Parts of a model that are models, too, need not attend.
        if getattr(_LOCAL, "is_within", False):
            return before(self, *args, **kwargs)
        group = cut.axis.get_group()
        count, _LOCAL.is_within = num_agreed(group), True
        try:
            _check(self, model, given)
            with _embedding_own_positions(self, model, cut):
                result = before(self, *args, **kwargs)
        finally:
            _LOCAL.is_within = False
        _check_result(self, result)
        if num_agreed(group) == count:
            problem = f"{type(self).__name__} has called no attention that looks across ranks."
            refuse(NAME, problem, WITHOUT)
        return result

    model.__call__ = call
    try:
        yield
    finally:
        if replaced is None:
            del model.__call__
        else:
            model.__call__ = replaced


def _given(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by their names, as far as the model knows them."""
    return {**dict(zip(_parameters(model), args, strict=False)), **kwargs}


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward takes."""
    kind: Any = type(module)
    return _parameters_of(kind)


@lru_cache(1024)
def _parameters_of(kind: Any) -> tuple[str, ...]:
    return tuple(signature(kind.forward).parameters)[1:]


def _takes_positions(module: nn.Module) -> bool:
    return _POSITIONS in _parameters(module)


def _tokens(given: dict[str, Any]) -> torch.Tensor | None:
    """What has the positions of a call, as its dim 1."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given.get(name), torch.Tensor) and given[name].dim() > 1:
            tokens: torch.Tensor = given[name]
            return tokens
    return None


def _positions(model: nn.Module, given: dict[str, Any], cut: Cut) -> torch.Tensor | None:
    """What a call with this rank's part is to be given, (B, s) or (1, s); None where it has what it needs.

    Those that are given already stay, but in models that count from another number than 0: there this rank's own, as
    `CutBatch.position_ids` has them, are counted from it. Calls that don't fit find their own error in attention.
    """
    tokens = _tokens(given)
    is_part = tokens is not None and tokens.shape[1] == cut.parts.size(cut.axis.get_local_rank())
    if tokens is None or not is_part or not _takes_positions(model):
        return None
    told = given.get(_POSITIONS)
    first = _first_position(model)
    if told is not None and not (first and isinstance(told, torch.Tensor) and told.shape[-1] == tokens.shape[1]):
        return None
    positions = positions_in_block(cut, tokens.device)
    positions = positions if positions.dim() > 1 else positions.unsqueeze(0)
    if not first:
        return positions
    own = positions + first
    if not tokens.is_floating_point():
        # Padding, which is behind all else, has no position.
        own = torch.where(tokens.eq(first - 1), first - 1, own)
    # Decided on the device, which nobody need wait for.
    return own if told is None else torch.where((told == positions).all(), own, told)


def _first_position(model: nn.Module) -> int:
    """The number from which a model counts: RoBERTa and its kin have padding's below it."""
    for name, module in model.named_modules():
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None and name.endswith("position_embeddings"):
            return int(padding) + 1
    return 0


def _check(model: nn.Module, kind: type[nn.Module], given: dict[str, Any]) -> None:
    """Refuses what sees only this rank's positions."""
    name = type(model).__name__
    if "decoder_input_ids" in _parameters(model):
        refuse(NAME, f"{name} has two sequences, an encoder's and a decoder's, and one is cut.", WITHOUT)
    if any(given.get(cache) is not None for cache in _CACHES):
        problem = "it is given a cache of keys, as by generate(), which are those of this rank's positions alone."
        refuse(NAME, problem, "Generate outside of the block.")
    if given.get("labels") is not None and given.get("shift_labels") is None and _shifts_labels(model):
        problem = f"{name} shifts labels within this rank's positions, where the next rank has some."
        refuse(NAME, problem, "Give shift_labels=batch.targets beside them.")
    takes_positions = any(isinstance(module, kind) and _takes_positions(module) for module in model.modules())
    for module in model.modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,):
            refuse(NAME, f"{name} has convolutions, which see this rank's positions alone.", WITHOUT)
        if getattr(module, "trigram_input", False):  # MobileBERT's
            refuse(NAME, f"{name} embeds a token with its neighbours, of which another rank has some.", WITHOUT)
        if not takes_positions and _embeds_positions(module) and not _takes_positions(module):
            refuse(NAME, f"{name} counts positions itself, in {type(module).__name__}, from this rank's 0.", WITHOUT)


def _shifts_labels(model: nn.Module) -> bool:
    return str(getattr(model, "loss_type", None)).endswith(("ForCausalLM", "ForConditionalGeneration"))


def _check_result(model: nn.Module, result: Any) -> None:
    """Refuses what is one of a sequence, such as the class that its first or last token tells."""
    logits = getattr(result, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.dim() < 3:
        problem = f"{type(model).__name__} gives scores of shape {tuple(logits.shape)}, without positions."
        refuse(NAME, problem, WITHOUT)


def _embeds_positions(module: nn.Module) -> bool:
    return "Position" in type(module).__name__ and "Embedding" in type(module).__name__


@contextmanager
def _embedding_own_positions(model: nn.Module, kind: type[nn.Module], cut: Cut) -> Iterator[None]:
    """Has the embeddings of positions of a model that takes none be given this rank's, (s,)."""
    if any(isinstance(module, kind) and _takes_positions(module) for module in model.modules()):
        yield
        return
    with ExitStack() as stack:
        for module in model.modules():
            if _embeds_positions(module):
                hook: Callable[..., Any] = partial(_with_positions, cut)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _with_positions(
    cut: Cut, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight: Any = module.weight
    positions = positions_in_block(cut, weight.device)
    if positions.dim() > 1:
        problem = f"{type(module).__name__} takes the same positions for all sequences, and documents begin elsewhere."
        refuse(NAME, problem, "Pack all sequences alike: document_ids (S,).")
    index = _parameters(module).index(_POSITIONS)
    return args[:index], {**kwargs, _POSITIONS: positions}
