"""Products of sorted rows with each expert's own weights, as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.autocast import is_within_autocast
from disttrain.errors import ShapeError
from disttrain.kernels._torch import applied_plainly, are_plain
from disttrain.kernels.grouped import mlp
from disttrain.kernels.grouped.choice import kernels_of, outer, product
from disttrain.kernels.grouped.float8 import RECIPES
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.kernels.operators import call, define, differentiate, once, refuse_second_derivative

GateUp = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Multiplies each expert's rows by its weight, all experts' in one launch.

    Args:    x       (rows, in), sorted by expert.
             weight  (experts, out, in), or (experts, in, out) where `is_transposed`.
             ends    (experts,) int32 on x's device, as of `ExpertOrder`.
             bias    (experts, out).
    Returns: (rows, out); zeros in rows past the last end.
    Raises:  ShapeError for what does not fit.
    Gradient: of x, weight and bias, once.
    """
    _check("grouped_linear", x, ends, {"weight": weight, "bias": bias}, [weight.shape[1 if is_transposed else 2]])
    x, weight, bias = _as_autocast_says(x, weight, bias)
    return call(LINEAR, x, weight, ends, bias, is_transposed)  # type: ignore[no-any-return]


def expert_mlp(
    x: torch.Tensor,
    ends: torch.Tensor,
    gate_up: GateUp,
    down: torch.Tensor,
    form: GatedForm,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    float8: str = "",
) -> torch.Tensor:
    """Computes all experts' gated layers on rows that are sorted by expert.

    Args:    x         (rows, D), sorted by expert.
             ends      (experts,) int32 on x's device: the first row after each expert's.
             gate_up   (experts, 2 H, D), or the two halves (experts, H, D) apart; transposed as `form` says.
             down      (experts, D, H).
             gate_up_bias, down_bias  (experts, 2 H) and (experts, D); of joined halves alone.
             float8    "tensorwise" or "rowwise": products of rows and weights in float8.
    Returns: (rows, D); zeros in rows past the last end.
    Raises:  ShapeError for what does not fit.
    Gradient: of x and all weights, once. Backward keeps x and the products with gate and up.
    """
    weights = _weights("expert_mlp", x, ends, gate_up, down, form, gate_up_bias, down_bias, float8)
    x, *weights = _as_autocast_says(x, *weights)
    return _compute((x, ends, None, None, None, *weights), form, float8)


def mix_experts(
    x: torch.Tensor,
    order: ExpertOrder,
    weights: torch.Tensor,
    gate_up: GateUp,
    down: torch.Tensor,
    form: GatedForm,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    float8: str = "",
) -> torch.Tensor:
    """Computes each token's weighted sum of its experts' gated layers, where one rank holds all experts.

    It is `combine_rows(expert_mlp(take_rows(x)))` in one operator, which keeps no rows for backward but those of gate
    and up.

    Args:    x        (tokens, D).
             order    the tokens' experts, sorted.
             weights  (tokens, k).
             The others are as of `expert_mlp`.
    Returns: (tokens, D).
    """
    if weights.dim() != 2 or x.dim() != 2 or weights.shape[0] != x.shape[0] or weights.numel() != order.order.shape[0]:
        problem = f"x has shape {tuple(x.shape)}, weights {tuple(weights.shape)}; {len(order.order)} were sorted."
        raise ShapeError("mix_experts", problem, "Give (tokens, D) and (tokens, k) of the sorted tokens.")
    tensors = _weights("mix_experts", x, order.ends, gate_up, down, form, gate_up_bias, down_bias, float8)
    x, *tensors = _as_autocast_says(x, *tensors)
    return _compute((x, order.ends, order.order, order.slots, weights, *tensors), form, float8)


def _weights(
    operation: str,
    x: torch.Tensor,
    ends: torch.Tensor,
    gate_up: GateUp,
    down: torch.Tensor,
    form: GatedForm,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    float8: str,
) -> list[torch.Tensor | None]:
    """Gate, up, down and biases, which fit."""
    gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    if float8 not in RECIPES:
        raise ShapeError(operation, f"float8 is {float8!r}.", "Give tensorwise, rowwise or nothing.")
    if up is not None and (gate_up_bias is not None or form.is_interleaved or up.shape != gate.shape):
        problem = f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}, apart."
        raise ShapeError(operation, problem, "Give halves of one shape, without a bias and not interleaved.")
    ins, outs = (1, 2) if form.is_transposed else (2, 1)
    named = {"gate_up": gate, "up": up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    of_gate, of_down = gate.shape, down.shape
    _check(operation, x, ends, named, (of_gate[ins], of_down[outs]))
    hidden = of_gate[outs] if up is not None else of_gate[outs] / 2
    if of_down[ins] != hidden:
        problem = f"gate_up has {hidden} columns for each half, and down takes {of_down[ins]}."
        raise ShapeError(operation, problem, "Give weights of one hidden size.")
    return [gate, up, down, gate_up_bias, down_bias]


def _check(
    operation: str, x: torch.Tensor, ends: torch.Tensor, named: dict[str, torch.Tensor | None], sizes: Sequence[int]
) -> None:
    """Raises unless x's rows have one of `sizes`, and all weights are of the experts in `ends`."""
    count = ends.shape[0]
    matches = x.dim() == 2 and ends.dtype == torch.int32 and sizes.count(x.shape[1]) == len(sizes)
    for tensor in named.values():
        matches = matches and (tensor is None or tensor.shape[0] == count)
    if not matches:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items() if tensor is not None)
        problem = f"x is {tuple(x.shape)}, ends {ends.dtype} of shape {tuple(ends.shape)}; {shapes}."
        raise ShapeError(
            operation, problem, "Give rows (rows, D), and weights of as many experts as ends has, by int32."
        )


def _as_autocast_says(x: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """In autocast's dtype, as a linear layer's; else as they are."""
    if not is_within_autocast(x.device) or x.dtype == torch.float64:
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (x, *others))


def _plain(form: GatedForm) -> tuple[str, bool, bool, float, float]:
    return form.activation, form.is_interleaved, form.is_transposed, form.limit, form.alpha


def _compute(tensors: tuple[torch.Tensor | None, ...], form: GatedForm, recipe: str) -> torch.Tensor:
    """The result of `MLP`; called in Python where nobody watches operators, which takes the host half as long."""
    if are_plain(tensors):
        return _apply(*tensors, form, recipe)  # type: ignore[no-any-return]
    return call(MLP, *tensors, *_plain(form), recipe)[0]  # type: ignore[no-any-return]


class _Mlp(torch.autograd.Function):
    """`MLP` and its backward without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *tensors, form, recipe = arguments
        x, ends, tokens, experts = _parts(tensors)
        # Those of the gradient in backward, too.
        kernels = kernels_of(x)
        result, gate, up = mlp.forward(x, ends, tokens, experts, form, recipe, kernels=kernels)
        ctx.others = form, recipe, kernels
        ctx.save_for_backward(*tensors, gate, up)
        return result

    @staticmethod
    @once("expert_mlp")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        form, recipe, kernels = ctx.others
        *tensors, gate, up = ctx.saved_tensors
        wants = ctx.needs_input_grad
        wants_experts = True in wants[5:10]
        arguments = (*_parts(tensors), gate, up, form, recipe, wants[0], wants_experts)
        grads = mlp.backward(grad.contiguous(), *arguments, kernels=kernels)
        of_bias = grads.down_bias if wants[9] else None
        of_weights = grads.weights if wants[4] else None
        if not wants_experts:
            return grads.x, None, None, None, of_weights, *[None] * 7
        of_experts = [grad if asked else None for grad, asked in zip(grads[2:6], wants[5:9], strict=True)]
        return grads.x, None, None, None, of_weights, *of_experts, of_bias, None, None


_apply: Final = applied_plainly(_Mlp)


def _parts(tensors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, mlp.Tokens | None, mlp.ExpertWeights]:
    """x, ends, tokens and weights, as `mlp` takes them, each laid out line by line, of `MLP`'s first ten arguments."""
    x, ends, order, slots, weights, gate, up, down, gate_bias, down_bias = tensors
    tokens = None if order is None else mlp.Tokens(order, slots, ends, weights.contiguous())
    experts = mlp.ExpertWeights(
        gate.contiguous(),
        None if up is None else up.contiguous(),
        down.contiguous(),
        None if gate_bias is None else gate_bias.contiguous(),
        None if down_bias is None else down_bias.contiguous(),
    )
    return x.contiguous(), ends, tokens, experts


def _linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    result = product(x.contiguous(), weight.contiguous(), ends, is_transposed)
    if bias is not None:
        kernels_of(result).add_bias(result, bias.contiguous(), ends, None, None)
    return kernels_of(result).clear_past(result, ends)


def _linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    plain, rows = grad.contiguous(), x.contiguous()
    of_x = kernels_of(x).clear_past(product(plain, weight.contiguous(), ends, not is_transposed), ends)
    of_weight = outer(rows, plain, ends) if is_transposed else outer(plain, rows, ends)
    of_bias = x.new_empty(0) if bias is None else kernels_of(x).bias_grad(plain, bias.contiguous(), ends, None, None)[0]
    return of_x, of_weight, of_bias


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.is_transposed = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_linear(ctx: Any, grad: torch.Tensor) -> Any:
    # Once: a checkpoint computes what was saved anew, and gives it to one reader.
    saved = ctx.saved_tensors
    x, weight, bias = torch.ops.disttrain.grouped_linear_backward(grad, *saved, ctx.is_transposed)
    return x, weight, None, bias if saved[3] is not None else None, None


def _mlp(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *form, recipe = arguments[10:]
    x, ends, tokens, experts = _parts(arguments[:10])
    result, of_gate, of_up = mlp.forward(x, ends, tokens, experts, GatedForm(*form), recipe)
    return result, of_gate, x.new_empty(0) if of_up is None else of_up


def _mlp_shapes(
    x: torch.Tensor, ends: Any, order: Any, slots: Any, weights: Any, gate: Any, up: Any, down: Any, *rest: Any
) -> Any:
    num_rows = x.shape[0] if order is None else order.shape[0]
    is_transposed = rest[4]
    kept = x.new_empty((num_rows, gate.shape[2 if is_transposed else 1]))
    return x.new_empty(x.shape), kept, x.new_empty(0 if up is None else kept.shape)


def _mlp_backward(grad: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    """`arguments`: those of `MLP`, with what it kept of gate and up behind the tensors, and what is wanted at last."""
    tensors, (kept_gate, kept_up), wanted = arguments[:10], arguments[10:12], arguments[18:]
    *form, recipe = arguments[12:18]
    kept_up = None if tensors[6] is None else kept_up
    grads = mlp.backward(grad.contiguous(), *_parts(tensors), kept_gate, kept_up, GatedForm(*form), recipe, *wanted)
    return [grad.new_empty(0) if result is None else result for result in grads]


def _mlp_backward_shapes(
    grad: Any, x: Any, ends: Any, order: Any, slots: Any, weights: Any, *rest: Any
) -> list[torch.Tensor]:
    *_, wants_x, wants_experts = rest
    experts = [*rest[:4], rest[4]] if wants_experts else [None] * 4 + [rest[4]]
    tensors = (x if wants_x else None, weights, *experts)
    return [x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors]


def _keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.form = inputs[10:]
    ctx.save_for_backward(*inputs[:10], *output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_mlp(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
    """The gradients of `MLP`'s 16 arguments."""
    if grad is None:
        return (None,) * 16
    wanted = ctx.needs_input_grad
    arguments = (grad, *ctx.saved_tensors, *ctx.form, wanted[0], any(wanted[5:10]))
    x, weights, *of_experts = torch.ops.disttrain.expert_mlp_backward(*arguments)
    parameters = (result if wants else None for result, wants in zip(of_experts, wanted[5:10], strict=True))
    return x if wanted[0] else None, None, None, None, weights if wanted[4] else None, *parameters, *(None,) * 6


_EXPERTS = "Tensor gate, Tensor? up, Tensor down, Tensor? gate_bias, Tensor? down_bias"
_FORM = "str activation, bool is_interleaved, bool is_transposed, float limit, float alpha, str recipe"
_SORTING = "Tensor x, Tensor ends, Tensor? order, Tensor? slots, Tensor? weights"
LINEAR: Final = define(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends, Tensor? bias, bool is_transposed) -> Tensor",
    _linear,
    lambda x, weight, ends, bias, is_transposed: x.new_empty((x.shape[0], weight.shape[2 if is_transposed else 1])),
)
LINEAR_BACKWARD: Final = define(
    "grouped_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor ends, Tensor? bias, bool is_transposed) "
    "-> (Tensor, Tensor, Tensor)",
    _linear_backward,
    lambda grad, x, weight, ends, bias, _: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    ),
)
MLP: Final = define(
    f"expert_mlp({_SORTING}, {_EXPERTS}, {_FORM}) -> (Tensor, Tensor, Tensor)", _mlp, _mlp_shapes, is_traceable=True
)
MLP_BACKWARD: Final = define(
    f"expert_mlp_backward(Tensor grad, {_SORTING}, {_EXPERTS}, Tensor kept_gate, Tensor kept_up, {_FORM}, "
    "bool wants_x, bool wants_experts) -> Tensor[]",
    _mlp_backward,
    _mlp_backward_shapes,
    is_traceable=True,
)
differentiate(LINEAR, _keep_linear, _backward_of_linear)
differentiate(MLP, _keep_mlp, _backward_of_mlp)
refuse_second_derivative(LINEAR_BACKWARD)
refuse_second_derivative(MLP_BACKWARD)
