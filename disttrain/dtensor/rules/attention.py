"""Scaled dot product attention: batch and heads may be cut; queries too, where none may see more keys than another."""

from __future__ import annotations

from disttrain.dtensor.rules.axis_map import AxisMap, aligned_letters, operand_called, signatures_of, zeros_where_empty
from disttrain.dtensor.rules.base import OpCall, Rule

_BACKWARD = "_backward"

_HEADS = "bhl."
_LOG_SUMS = ("logsumexp", "log_sumexp")


def attention(call: OpCall) -> AxisMap | None:
    """Letters: b batch, h heads, l queries. Keys, and the features of a head, stay whole."""
    query, key, value = (operand_called(call, name) for name in ("query", "key", "value"))
    # The ranks' random masks would not be the pieces of one mask.
    if query is None or key is None or value is None or call.argument("dropout_p", 0.0):
        return None
    has_as_many_heads = query.shape[1] == key.shape[1] == value.shape[1]
    keys = "bh.." if has_as_many_heads else "b..."
    is_flash = "flash" in call.facts.name
    cut = "b" + "h" * has_as_many_heads + "l" * (is_flash and not call.argument("is_causal", False))
    # Only flash attention keeps its sums of exponentials query by query; others pad them.
    log_sums = "bhl" if is_flash else "bh.."
    operands = {
        **dict.fromkeys(("query", "grad_out", "grad_out_", "out"), _HEADS),
        **dict.fromkeys(("key", "value"), keys),
        **dict.fromkeys(_LOG_SUMS, log_sums),
    }
    mask_name = "attn_mask" if is_flash else "attn_bias"
    scores = (*query.shape[:3], key.shape[2])
    mask = operand_called(call, mask_name)
    if mask is not None:
        operands[mask_name] = aligned_letters(_HEADS, mask.shape, scores)
    num_others = len(call.outputs) - 2
    everything = frozenset(operands)
    if call.facts.name.endswith(_BACKWARD):
        biases = (operands.get(mask_name, ""),) * (len(call.outputs) - 3)
        return AxisMap(operands, (_HEADS, keys, keys, *biases), cut)
    sources = (everything, everything, *[frozenset[str]()] * num_others)
    return AxisMap(operands, (_HEADS, log_sums, *[""] * num_others), cut, sources=sources)


_OPERATORS = (
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)


def _rule(name: str) -> Rule:
    # Kernels on GPUs return numbers beside tensors, which a rank with an empty part would have to make up.
    may_be_uneven = name.removesuffix(_BACKWARD).endswith("_for_cpu")
    return Rule(
        signatures_of(attention),
        zeros_where_empty,
        shards_unevenly=may_be_uneven,
        reads_numbers=True,
        goes_by_layout=True,
    )


RULES = {name: _rule(name) for operator in _OPERATORS for name in (operator, operator + _BACKWARD)}
