"""Has models of transformers attend across ranks: by their own registries, for as long as a block runs.

A model asks a registry for the mask of a layer, and another for its attention. Masks would be of this rank's positions
alone: a gap in them looks like another document's start. Here none is made, and rules say what it would have said
(`unmade.py`). What looks at other positions in ways of its own, such as convolutions, recurrences and attention that
asks no registry, sees this rank's alone. So a model that has such layers is refused, and one that never attends across
ranks (`model_calls.py`).

Source: transformers, "Attention mask interface" and "Attention interface" (documentation of 5.0).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from disttrain.context_parallel.faults import refuse, refuse_dropout, refuse_mask
from disttrain.context_parallel.model_calls import calling
from disttrain.context_parallel.unmade import NAME, WITHOUT, UnmadeMask, rules_of
from disttrain.kernels import Causal, SlidingWindow, SoftCap, attention
from disttrain.kernels.attention.rules import Mask, Rule, Rules

_MASKS: Final = ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS")
_ATTENTIONS: Final = ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS")
_MODELS: Final = ("transformers.modeling_utils", "PreTrainedModel")
_ATTENTION_ALONE: Final = {"full_attention", "sliding_attention", "dense", "sparse", "mlp", "moe"}
"""Kinds of layers whose attention is all that looks at other positions."""
_UNKNOWN: Final = ("s_aux", "position_bias")
"""Of attention's options those that change scores in ways for which there is no rule."""


@contextmanager
def attention_of_transformers(within: Callable[[], Mask | None]) -> Iterator[None]:
    """Has models of transformers, if it is loaded, call `kernels.attention`, whichever implementation they ask for.

    Args: within  gives what a call sees at most; where it raises LookupError, on ranks that are in no block, models do
                  what they did.
    """
    with ExitStack() as stack:
        for (module, name), function in ((_MASKS, _no_mask), (_ATTENTIONS, _attend)):
            registry = getattr(sys.modules.get(module), name, None)
            if registry is not None:
                functions = {key: _found(function, within, registry.get(key)) for key in (*registry, "eager")}
                stack.enter_context(_with(registry, functions))
        model = getattr(sys.modules.get(_MODELS[0]), _MODELS[1], None)
        if model is not None:
            stack.enter_context(calling(model))
        yield


def _found(function: Callable[..., Any], within: Callable[[], Mask | None], before: Any) -> Callable[..., Any]:
    """Calls `function` in a block, with what is seen at most, and `before` on ranks that are in none."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            mask = within()
        except LookupError:
            return before(*args, **kwargs)
        return function(mask, *args, **kwargs)

    return call


def _attend(
    within: Mask | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | UnmadeMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None and not isinstance(attention_mask, UnmadeMask):
        refuse_mask(NAME, tuple(attention_mask.shape))
    if dropout:
        refuse_dropout(NAME, dropout)
    for name in _UNKNOWN:
        if options.get(name) is not None:
            refuse(NAME, f"it has {name}, for which there is no rule.", WITHOUT)
    rules: list[Rule] = []
    if attention_mask is not None:
        rules += attention_mask.rules
    else:
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            rules.append(Causal())
        if options.get("sliding_window") is not None:
            rules.append(SlidingWindow(options["sliding_window"]))
    if options.get("softcap") is not None:
        rules.append(SoftCap(options["softcap"]))
    if within is not None:
        rules.append(within)
    attended = attention(query, key, value, Rules(tuple(rules)) if rules else None, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _no_mask(*_: object, mask_function: Callable[..., Any], **options: Any) -> UnmadeMask:
    mask = options.get("attention_mask")
    # Many models make one of ones where they are given none.
    if mask is not None and not bool(mask.all()):
        problem = f"attention_mask of shape {tuple(mask.shape)} hides {int((mask == 0).sum())} positions."
        remedy = "Leave it out: pad behind, and ignore the labels there; or pack documents (cut_batch)."
        refuse(NAME, problem, remedy)
    others = {*(getattr(options.get("config"), "layer_types", None) or ())} - _ATTENTION_ALONE
    if others:
        problem = f"it has layers of the kind {', '.join(sorted(others))}, which see this rank's positions alone."
        refuse(NAME, problem, WITHOUT)
    return UnmadeMask(tuple(rules_of(mask_function)))


@contextmanager
def _with(registry: MutableMapping[str, Any], functions: dict[str, Any]) -> Iterator[None]:
    """Puts functions into a registry, and what was there back again."""
    before = {name: registry[name] for name in functions if name in registry}
    for name, function in functions.items():
        registry[name] = function
    try:
        yield
    finally:
        for name in functions:
            if name in before:
                registry[name] = before[name]
            else:
                del registry[name]
