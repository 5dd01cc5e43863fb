"""Has a model's attention look across the ranks of an axis while a block runs, whichever function it calls.

Three are met: `kernels.attention`, which asks by itself (`using`); torch's scaled_dot_product_attention, however it was
imported; and that of models of transformers (`pretrained.py`), which make masks of their own otherwise. What is
checkpointed in a block enters it again when a backward behind it computes it anew.

torch's function is replaced where it lies, since torch's own functions call it there, and looked for by a mode, since a
module may have imported it by name. Both hold on the threads on which a backward computes blocks anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from threading import Lock
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from disttrain.context_parallel._torch import FLEX, checkpointing
from disttrain.context_parallel.faults import refuse, refuse_dropout, refuse_mask
from disttrain.context_parallel.pretrained import attention_of_transformers
from disttrain.context_parallel.unmade import UnmadeMask
from disttrain.kernels import Causal, attention
from disttrain.kernels.attention.context.current import between_graphs, current_cut, using
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.rules import Mask, Rule, Rules
from disttrain.mesh import DeviceMesh
from disttrain.process_group._torch import outside_graphs, run_outside

NAME: Final = "scaled_dot_product_attention"
_TORCHS: Final = F.scaled_dot_product_attention
_ATEN: Final = torch.ops.aten.scaled_dot_product_attention
_NAMES_OF_TORCHS: Final = {_TORCHS, _ATEN, _ATEN.default}
_UNFLATTEN: Final = torch.Tensor.unflatten
_SIGNATURE_OF_HEADS: Final = signature(F.multi_head_attention_forward)


@contextmanager
def attending(parts: Parts, axis: DeviceMesh, way: str | None = None, within: Mask | None = None) -> Iterator[None]:
    """Attention within the block, and in backwards that run there, is that of sequences cut by `parts` over `axis`.

    Args: within  what calls without a rule of ours see at most, such as their own document.
    """
    with using(parts, axis, way, within), _BLOCKS.entered(), _Mode():
        yield


class _Blocks:
    """The blocks that are open in this process. With the first of them torch's function, and those of transformers, are
    replaced, and with the last they are put back: ranks that are threads enter and leave in any order."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_open = 0
        self._replaced = ExitStack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            if not self._num_open:
                self._replaced.enter_context(_replacing())
                self._replaced.enter_context(attention_of_transformers(_within))
                self._replaced.enter_context(checkpointing(_within_the_same_block))
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._replaced.close()


_BLOCKS: Final = _Blocks()


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _NAMES_OF_TORCHS:
            return _attended_here(*args, **kwargs or {})
        if func is F.multi_head_attention_forward:
            _check_heads(*args, **kwargs or {})
            # To Dynamo it is one call, which it would make with tensors that have no values.
            return run_outside(partial(func, *args, **kwargs or {}))
        if func is FLEX:
            _refuse_flex()
        if func is _UNFLATTEN:
            # Dynamo knows it as a method alone, and would break the graph.
            return args[0].unflatten(*args[1:], **kwargs or {})
        return func(*args, **kwargs or {})


@contextmanager
def _replacing() -> Iterator[None]:
    before = F.scaled_dot_product_attention

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return before(*args, **kwargs) if current_cut() is None else _attended_here(*args, **kwargs)

    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


_FLEX_FAULT: Final = "its masks and scores are functions of places, of which a rank has its own alone"
_FLEX_REMEDY: Final = (
    "Call disttrain.kernels.attention with rules, such as Causal() & SlidingWindow(size) & SoftCap(cap)."
)


# flex_attention compiles itself, and Dynamo shows the reason.
@partial(outside_graphs, reason=f"positions are cut over ranks, and flex_attention: {_FLEX_FAULT}. {_FLEX_REMEDY}")
def _refuse_flex() -> NoReturn:
    refuse("flex_attention", f"{_FLEX_FAULT}.", _FLEX_REMEDY)


def _within_the_same_block(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a checkpoint, which a backward behind the block computes anew."""
    cut = current_cut()
    if cut is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        if current_cut() == cut:
            return function(*args, **kwargs)
        with attending(*cut):
            return function(*args, **kwargs)

    return run


@between_graphs
def _attended_here(*args: Any, **kwargs: Any) -> torch.Tensor:
    return attended_across(*args, within=_within(), **kwargs)


def _within() -> Mask | None:
    """The most that calls of this rank see. Raises LookupError where it is in no block."""
    cut = current_cut()
    if cut is None:
        raise LookupError
    return cut.within


def attended_across(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | UnmadeMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    within: Mask | None = None,
) -> torch.Tensor:
    """Computes torch's function of sequences that are cut. Raises LayoutError for a mask in memory and for dropout."""
    if attn_mask is not None and not isinstance(attn_mask, UnmadeMask):
        refuse_mask(NAME, tuple(attn_mask.shape))
    if dropout_p > 0.0:
        refuse_dropout(NAME, dropout_p)
    tensors = query, key, value
    if any(tensor.dim() != 4 or tensor.shape[0] != query.shape[0] for tensor in tensors):
        (query, key, value), shape = _as_batch(*tensors)
        attended = attended_across(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, within=within)
        return attended.reshape(*shape, *attended.shape[-2:])
    # One head of keys broadcasts, as torch has it.
    if not enable_gqa and query.dim() == 4 and key.shape[1] not in (1, query.shape[1]):
        problem = f"query has {query.shape[1]} heads and key {key.shape[1]}, without enable_gqa."
        refuse(NAME, problem, "Give enable_gqa=True.")
    rule: Rule | None = Causal() if is_causal else None
    if attn_mask is not None:
        rule = Rules(attn_mask.rules) if attn_mask.rules else None
    return attention(query, key, value, both(rule, within), scale=scale)


def _as_batch(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Tensors (..., H, L, E), or (L, E), as (B, H, L, E), with the dims before L of the result; they broadcast."""
    with_heads = [tensor if tensor.dim() > 2 else tensor.unsqueeze(0) for tensor in tensors]
    try:
        outer = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in with_heads))
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        refuse(NAME, f"query, key and value have shapes {shapes}.", "Give (..., H, L, E), alike but for H.")
    batch = [
        tensor.expand(*outer, *tensor.shape[-3:]).reshape(outer.numel(), *tensor.shape[-3:]) for tensor in with_heads
    ]
    return batch, (*outer, *tensors[0].shape[-3:-2])


def both(rule: Rule | None, within: Mask | None) -> Rule | None:
    """The conjunction of those that are there. Caches find it again by its parts."""
    if rule is None or within is None:
        return within if rule is None else rule
    return Rules((rule, within))


def _check_heads(*args: Any, **kwargs: Any) -> None:
    """nn.MultiheadAttention makes the scores itself where it is to give them back."""
    bound = _SIGNATURE_OF_HEADS.bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["need_weights"]:
        problem = "it is to give back the weights, which are those of this rank's positions alone."
        refuse("multi_head_attention_forward", problem, "Call nn.MultiheadAttention with need_weights=False.")
