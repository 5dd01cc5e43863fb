"""The only file of `kernels` that knows torch's private names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

without_torch_function: Any = torch._C._disabled_torch_function_impl
"""As the `__torch_function__` of a class of tensors: what is done with them is dispatched as with any."""

without_modes: Any = torch._C.DisableTorchFunction
"""Within it neither a class's `__torch_function__` nor a mode's is asked."""

make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""A tensor of the given class, without memory of its own."""

map_tensors: Any = tree_map_only
"""In nested arguments, put a function's result in place of each value of a class."""

_GRAD: Final = attrgetter("grad")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module does more than its class's forward."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def modes() -> tuple[Any, ...]:
    """Modes of `with` blocks that decide how operators are computed and differentiated; a trace of operators doesn't
    show them."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def chunk_cat(tensors: Sequence[torch.Tensor], num_chunks: int, out: torch.Tensor) -> None:
    """Cut dim 0 of each tensor into `num_chunks` padded pieces; row r of `out` gets the r-th of each, cast."""
    torch._chunk_cat(list(tensors), dim=0, num_chunks=num_chunks, out=out)


def grads_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient of each."""
    with without_modes():
        return [*map(_GRAD, tensors)]


def norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The norm of each, in one launch where they are plain tensors of one device and dtype."""
    return torch._foreach_norm(list(tensors), 2.0, dtype)


def version_of(tensor: torch.Tensor, local: torch.Tensor) -> tuple[int, ...]:
    """Another one when torch's operators have written to the tensor or to `local`, its part, or that is another one."""
    # What goes through a DTensor counts there alone.
    return local.data_ptr(), local._version, tensor._version


def add_one(counts: Sequence[torch.Tensor]) -> None:
    """Adds one to each number on the CPU."""
    torch._foreach_add_(list(counts), 1)


base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that another is a part of; None where it is whole."""


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy, and cast, each source to its target, in few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def is_within_a_graph() -> bool:
    """True while operators are recorded, transformed or differentiated from within, so that nothing may be timed."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._current_graph_task_id() != -1
    )


def is_transformed() -> bool:
    """True within a transform of torch.func, such as grad or jvp."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """True where derivatives are computed forward, by torch.func.jvp or torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0


def are_plain(values: Iterable[Any]) -> bool:
    """True if these are plain tensors with values, or None, and operators on them are seen by autograd alone: by no
    compiler, no transform and no mode."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False
    is_dead = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]  # of an ended transform
    # No generator: each step of one takes the host as long as a look at a tensor.
    for value in values:
        if value is not None and (type(value) not in _PLAIN or value.is_meta or is_dead(value)):
            return False
    return True


_PLAIN: Final = (torch.Tensor, nn.Parameter)


def applied_plainly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of a torch.autograd.Function for arguments that `are_plain`: without a look for transforms."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def as_constant(function: _Function) -> _Function:
    """Let Dynamo call `function` while it traces, and take the answer for a constant. Arguments must be constants."""
    # torch.compiler.assume_constant_result would load Dynamo.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_IS_TRACED: Final = ContextVar("_IS_TRACED", default=False)


def traced(kernel: Any) -> Any:
    """A Triton kernel, to be launched: a graph that traces the operator it belongs to holds the launch."""
    # Elsewhere torch's wrapper would take a millisecond.
    return torch.library.wrap_triton(kernel) if _IS_TRACED.get() else kernel


def is_traced() -> bool:
    """True while an operator is traced into a graph, with its own launches."""
    return _IS_TRACED.get()


def trace_in_place_of(
    op: Any, run: Callable[..., Any], is_seen: Callable[[tuple[Any, ...]], bool], library: Any, *, is_once: bool
) -> None:
    """Have AOTAutograd trace `run` in place of `op` for arguments that are `is_seen`.

    `is_once`: once for equal arguments. Then nobody may write to results.
    """
    # Loads modules of the compiler.
    from torch._subclasses import FakeTensor, functional_tensor

    plain = {torch.Tensor, torch.nn.Parameter, FakeTensor, functional_tensor.FunctionalTensor}

    def key_of(value: Any) -> tuple[Any, Any]:
        """A key that is equal for equal arguments, and what must be kept so that it stays so."""
        if not isinstance(value, functional_tensor.FunctionalTensor):
            return (type(value), value), None
        memory = value.from_functional()
        layout = (*map(str, memory.shape), "/", *map(str, memory.stride()), "/", str(memory.storage_offset()))
        return (memory.untyped_storage()._cdata, memory.dtype, layout), memory

    def decompose(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not plain.issuperset(types):
            return NotImplemented
        if kwargs or torch.compiler.is_exporting() or not is_seen(args):
            return mode.__torch_dispatch__(func, types, args, kwargs or {})
        # Graphs do not see afterwards that launches of kernels are equal.
        results = vars(mode).setdefault(f"_disttrain_{op}", {}) if is_once else {}
        keys, kept = zip(*map(key_of, args), strict=True) if is_once else ((), ())
        if keys not in results:
            with mode, _traced_launches():
                results[keys] = run(*args), kept
        return results[keys][0]

    torch.library.register_torch_dispatch(op, functional_tensor.FunctionalTensorMode, decompose, lib=library)


@contextmanager
def _traced_launches() -> Iterator[None]:
    token = _IS_TRACED.set(True)
    try:
        yield
    finally:
        _IS_TRACED.reset(token)


def cudnn_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, needs_grad: bool, scale: float
) -> torch.Tensor:
    """(B, H, L, E), (B, K, S, E) twice: cuDNN's attention; H is a multiple of K."""
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    return attend(query, key, value, None, needs_grad, 0.0, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: tuple[int, int], scale: float
) -> torch.Tensor:
    """FlashAttention 2, with the shapes of `cudnn_attention`. `window`: how many keys before and behind a query's own
    it sees, -1 for all."""
    before, behind = window
    attend: Any
    if before < 0 and behind <= 0:
        # Policies of activation checkpointing know this one by name.
        attend = torch.ops.aten._scaled_dot_product_flash_attention.default
        return attend(query, key, value, 0.0, behind == 0, False, scale=scale)[0]  # type: ignore[no-any-return]
    attend = torch.ops.aten._flash_attention_forward.default
    sizes: dict[str, Any] = {"scale": scale, "window_size_left": before, "window_size_right": behind}
    by_place = (tensor.transpose(1, 2) for tensor in (query, key, value))
    result = attend(*by_place, None, None, query.shape[2], key.shape[2], 0.0, False, False, **sizes)[0]
    return result.transpose(1, 2)  # type: ignore[no-any-return]


def efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, needs_grad: bool, scale: float
) -> torch.Tensor:
    """(B, H, L, E), (B, H, S, E), (B, H, S, Ev): xformers' memory-efficient attention."""
    attend: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return attend(query, key, value, None, needs_grad, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def cpu_attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, H, L, E), (B, H, S, E) twice: attention on CPUs, and the logarithms of the sums of its weights, (B, H, L)."""
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return attend(query, key, value, 0.0, is_causal, scale=scale)  # type: ignore[no-any-return]


def cpu_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value; `out` and `lse` may be those of attention over more keys."""
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # Its sums are in the order of places first, as forward gives them.
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return attend(grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale)  # type: ignore[no-any-return]


def flash_attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: tuple[int, int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `flash_attention`, with the logarithms of the sums of weights, (B, H, L): of no keys inf. Without autograd."""
    attend: Any = torch.ops.aten._flash_attention_forward.default
    by_place = (tensor.transpose(1, 2) for tensor in (query, key, value))
    lengths = (None, None, query.shape[2], key.shape[2])
    result, lse, *_ = attend(*by_place, *lengths, 0.0, False, False, **_sizes(window, scale))
    return result.transpose(1, 2), lse


def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `cpu_attention_backward`, with the shapes of `flash_attention`."""
    attend: Any = torch.ops.aten._flash_attention_backward.default
    by_place = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
    lengths = (None, None, query.shape[2], key.shape[2])
    # Where nothing is dropped they are not read.
    no_seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = attend(*by_place, lse, *lengths, 0.0, False, no_seed, no_seed[:0], **_sizes(window, scale))
    dquery, dkey, dvalue = (grad.transpose(1, 2) for grad in grads)
    return dquery, dkey, dvalue


def _sizes(window: tuple[int, int], scale: float) -> dict[str, Any]:
    before, behind = window
    return {"scale": scale, "window_size_left": before, "window_size_right": behind}


def cudnn_attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cudnn_attention`, with the logarithms of the sums of weights, (B, H, L)."""
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    result, lse, *_ = attend(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
    return result, lse.view(query.shape[:3])


def cudnn_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `cpu_attention_backward`, with the shapes of `cudnn_attention`."""
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    # Where nothing is dropped they are not read.
    no_seed = torch.zeros((), dtype=torch.int64, device=query.device)
    lengths = (None, None, None, query.shape[2], key.shape[2])
    sums = lse.contiguous().unsqueeze(-1)
    return attend(  # type: ignore[no-any-return]
        grad_out, query, key, value, out, sums, no_seed, no_seed, *lengths, 0.0, is_causal, scale=scale
    )


def scaled_mm(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype, is_fast: bool
) -> torch.Tensor:
    """a (M, K) times b (N, K) transposed, both in float8, with one scale each, or one for each row."""
    if a_scales.numel() == b_scales.numel() == 1:
        return torch._scaled_mm(a, b.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=is_fast)
    # With scales for rows, results come in bf16 alone.
    result = torch._scaled_mm(
        a, b.t(), a_scales[:, None], b_scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )
    return result.to(dtype)


def scaled_grouped_mm(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Rows a (M, K), sorted by group, times each group's b (G, N, K) transposed, in float8 with scales for rows, (M,)
    and (G, N): (M, N) of bf16."""
    return torch._scaled_grouped_mm(
        a, b.transpose(1, 2), a_scales, b_scales, ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def stamp_of(tensor: torch.Tensor) -> list[int]:
    """Another one when torch's operators have written to the tensor; -1 where nobody counts."""
    return [tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version]


def keep_busy(duration_s: float) -> None:
    """Has the current GPU wait about so long before what it is given next."""
    # By cycles, of which GPUs that multiply float8 have about 1.7e9 a second.
    torch.cuda._sleep(int(1.7e9 * duration_s))


def pack24(matrix: torch.Tensor) -> torch.Tensor:
    """A 2:4 sparse matrix (M, K) for `multiply24`."""
    return torch._cslt_compress(matrix)


def search24(packed: torch.Tensor, x: torch.Tensor) -> int:
    """cuSPARSELt's number of what multiplies these fastest; it tries them all."""
    with warnings.catch_warnings():
        # It says that it will be replaced; what replaces it is not in all versions.
        warnings.simplefilter("ignore", UserWarning)
        return torch._cslt_sparse_mm_search(packed, x.t(), transpose_result=True)


def multiply24(packed: torch.Tensor, x: torch.Tensor, algorithm: int) -> torch.Tensor:
    """x (R, K), contiguous, by the packed (N, K) transposed: (R, N), contiguous."""
    return torch._cslt_sparse_mm(packed, x.t(), transpose_result=True, alg_id=algorithm)


def release_saved(ctx: Any) -> None:
    """Has a backward that has read its saved tensors hold the last of them; not where the graph is kept for another."""
    ctx.maybe_clear_saved_tensors()


def asked_for(ctx: Any) -> list[bool]:
    """Of a torch.autograd.Function's tensor arguments, in their order, those whose gradients a backward needs: of
    some alone in torch.autograd.grad, and in the halves of a zero-bubble pipeline's backward."""
    asked = []
    for node, _ in ctx.next_functions:
        try:
            asked.append(node is not None and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # of a leaf whose gradient torch.autograd.grad returns
            asked.append(True)
    return asked
