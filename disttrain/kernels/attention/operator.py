"""Attention by rules: one function, served by the implementation that is fastest for a shape.

Source: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762); Ainslie et al., "GQA" (2305.13245).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from disttrain.autocast import is_within_autocast
from disttrain.dtensor import DTensor
from disttrain.errors import ShapeError
from disttrain.kernels.attention.choice import chosen, machine_of
from disttrain.kernels.attention.context.current import ENTERED
from disttrain.kernels.attention.plan import DENSE, NAMES, SDPA, Call, serving
from disttrain.kernels.attention.rules import (
    Alibi,
    Documents,
    Prefix,
    Rule,
    SlidingWindow,
    SoftCap,
    changes_of,
    parts_of,
    window_of,
)
from disttrain.kernels.attention.runs import RUNS
from disttrain.kernels.choice import tell_fallback

if TYPE_CHECKING:
    from disttrain.kernels.attention.context.parts import Parts
    from disttrain.mesh import DeviceMesh

NAME: Final = "attention"


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None = None,
    *,
    scale: float | None = None,
    by: str | None = None,
    axis: DeviceMesh | None = None,
    parts: Parts | None = None,
    way: str | None = None,
) -> torch.Tensor:
    """softmax(query key^T scale) value for each head, where `mask` says which keys a query sees.

        attended = kernels.attention(query, key, value, Causal() & SlidingWindow(4096) & SoftCap(50.0))

    Args:    query  (B, H, L, E);  key  (B, K, S, E);  value  (B, K, S, Ev), floats of one dtype, of any strides; each
             of the K heads serves H / K heads of queries. DTensors may be cut by sequences (B) and heads, and by
             positions (L) along `axis`; a rule's tensors are those of the whole then.
             mask   a rule or several (`attention/rules.py`), joined by &; None: each query sees all keys.
             scale  default 1 / sqrt(E).
             by     which implementation: cudnn, flash, efficient, flex, sdpa or dense; default: the fastest of those
             that serve the call, measured at the first call of its shape where that can be (`attention_choices`).
             axis   a mesh of one axis over which positions are cut: queries and keys are this rank's, the rule is the
             whole sequence's. Default: that of an enclosing `using` (`attention/context/current.py`), if any.
             parts  which positions each rank of the axis has; default: equally many, two mirrored runs each where
             queries see the keys before them, else one run.
             way    how keys come to queries of other ranks: "ring", "gather" or "heads"; default: the plan's choice.
    Returns: (B, H, L, Ev), as query; of queries that see no key zeros. Within autocast in its dtype.
    Raises:  ShapeError for tensors that don't fit, and for a `by` that does not serve them, with an axis on all its
             ranks; LayoutError for DTensors cut along L, S or E without an axis.
    Gradient: of query, key and value.
    Collective: with an axis, every rank of it, in the same order, and again in backward.
    """
    if isinstance(query, DTensor) or isinstance(key, DTensor) or isinstance(value, DTensor):
        # What is needed for DTensors needs this file.
        from disttrain.kernels.attention.dtensors import attention_of_dtensors

        return attention_of_dtensors(query, key, value, mask, scale, by, axis, parts, way)
    if axis is not None or parts is not None or ENTERED:
        # What is needed for positions that are cut needs this file.
        from disttrain.kernels.attention.context.operator import attention_across

        return attention_across(query, key, value, mask, scale, by, axis, parts, way)
    return attention_of_whole(query, key, value, mask, scale, by)


def attention_of_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    scale: float | None,
    by: str | None,
) -> torch.Tensor:
    """Computes `attention` of sequences of which this rank has all positions."""
    check_fits(query, key, value, mask)
    if is_within_autocast(query.device):
        query, key, value = (as_autocast(tensor) for tensor in (query, key, value))
        # What is computed within in fp32 stays so.
        with torch.autocast(query.device.type, enabled=False):
            return attention_of_whole(query, key, value, mask, scale, by)
    check_dtypes(query, key, value)
    call = call_of(query, key, value, mask)
    name = chosen(call, (query, key, value), mask, scale) if by is None else _asked(by, query, call)
    if name == DENSE and by is None and query.is_cuda and query.numel():
        tell_fallback(NAME, f"no kernel takes {query.dtype} with heads of {query.shape[-1]} elements here.")
    return RUNS[name](query, key, value, mask, scale)


def check_dtypes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ShapeError for anything but floats of one dtype."""
    if not query.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        problem = f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}."
        raise ShapeError(NAME, problem, "Give floats of one dtype, or use autocast.")


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def call_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Rule | None) -> Call:
    """The sizes of a call, for the plan."""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return Call(
        query.dtype,
        query.shape[0],
        query.shape[1],
        key.shape[1],
        query.shape[2],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        window_of(mask),
        len(changes_of(mask)) > 0,
        needs_grad,
    )


def _asked(by: str, query: torch.Tensor, call: Call) -> str:
    can_serve = {*serving(machine_of(query.device.type, query.device.index), call), DENSE}
    if not call.has_changes:
        can_serve.add(SDPA)
    if by in can_serve:
        return by
    problem = f"{by!r} does not serve {query.dtype} of shape {tuple(query.shape)} on {query.device.type}."
    raise ShapeError(NAME, problem, f"Known are {', '.join(NAMES)}; here {', '.join(sorted(can_serve))} do.")


def check_fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    whole_length: int | None = None,
) -> None:
    """Raise ShapeError for shapes, or a rule, that don't fit; of DTensors by their global shapes, so on all ranks.

    Args: whole_length  of the sequences that the rule is for, if these are parts of them.
    """
    fits = query.dim() == key.dim() == value.dim() == 4
    fits = fits and key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0]
    fits = fits and query.shape[3] == key.shape[3] and query.shape[3] > 0
    if not fits:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        problem = f"query, key and value have shapes {shapes}."
        raise ShapeError(NAME, problem, "Give (B, H, L, E), (B, K, S, E) and (B, K, S, Ev).")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        problem = f"{num_kv_heads} heads of keys cannot serve {num_heads} heads of queries alike."
        raise ShapeError(NAME, problem, "Give a divisor of the heads of queries.")
    for part in parts_of(mask):
        _check_rule(part, query, *((query.shape[2], key.shape[2]) if whole_length is None else 2 * (whole_length,)))


def _check_rule(part: Rule, query: torch.Tensor, num_queries: int, num_keys: int) -> None:
    batch_size, num_heads = query.shape[:2]
    if isinstance(part, SlidingWindow):
        if part.size < 1:
            raise ShapeError(NAME, f"SlidingWindow has size {part.size}.", "Give 1 or more.")
    elif isinstance(part, SoftCap):
        if not part.cap > 0:
            raise ShapeError(NAME, f"SoftCap has cap {part.cap}.", "Give a positive number.")
    elif isinstance(part, Documents):
        wanted = (num_queries,) if part.ids.dim() == 1 else (batch_size, num_queries)
        _check_one("Documents", part.ids, wanted, query)
        if num_keys != num_queries:
            problem = f"Documents has ids for {num_queries} queries, and there are {num_keys} keys."
            raise ShapeError(NAME, problem, "Give as many keys as queries.")
    elif isinstance(part, Prefix):
        _check_one("Prefix", part.lengths, (batch_size,), query)
    elif isinstance(part, Alibi):
        _check_one("Alibi", part.slopes, (num_heads,), query)


def _check_one(name: str, tensor: torch.Tensor, wanted: tuple[int, ...], query: torch.Tensor) -> None:
    if tuple(tensor.shape) != wanted or tensor.device != query.device:
        problem = f"{name} has a tensor of shape {tuple(tensor.shape)} on {tensor.device}."
        raise ShapeError(NAME, problem, f"Give {wanted} on {query.device}.")
