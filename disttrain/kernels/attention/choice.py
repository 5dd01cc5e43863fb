"""Chooses the implementation of attention for a call: measured once for each shape, and told to the other ranks.

If several can serve, each runs a few times on the call's own tensors, forward and backward. It runs in a separate
thread, so that the caller's hooks, modes and gradients are not involved: activation checkpointing must not see these
calls. In a graph that is traced or captured, and within backward, nothing can be timed. There the rule decides, or the
choice for earlier calls of the same kind.

The first rank that measures a shape writes its choice down, and all ranks use it, so that equal inputs give equal
numbers on all (docs/decisions/022-the-first-rank-decides.md). No rank waits for another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Final, NamedTuple

import torch

from disttrain.kernels._torch import as_constant, is_within_a_graph
from disttrain.kernels.agreement import agreed
from disttrain.kernels.attention.plan import Call, Machine, candidates
from disttrain.kernels.attention.rules import Rule, name_of
from disttrain.kernels.attention.runs import RUNS
from disttrain.kernels.choice import has_triton
from disttrain.settings import KERNELS

NUM_ROUNDS: Final = 5
_NUM_WARMUPS: Final = 2
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionChoice(NamedTuple):
    """The implementation that serves the calls like `call` that obey a rule called `rule`."""

    call: Call
    rule: str
    name: str
    seconds: tuple[tuple[str, float], ...]
    """Of each that was measured, forward and, where gradients are needed, backward; without those that failed."""

    def __str__(self) -> str:
        call = self.call
        heads = f"{call.num_heads}/{call.num_kv_heads} heads of {call.head_dim}"
        lengths = f"{call.num_queries} x {call.num_keys}"
        times = ", ".join(f"{name} {1e3 * duration:.3f} ms" for name, duration in self.seconds)
        step = "forward and backward" if call.needs_grad else "forward"
        dtype = str(call.dtype).removeprefix("torch.")
        return f"{self.rule}, {call.batch_size} x {heads}, {lengths}, {dtype}, {step}: {self.name} ({times})"


class _Choices:
    """The choices of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: dict[tuple[Call, str], AttentionChoice] = {}
        self._of_kind: dict[tuple[torch.dtype, str, bool], str] = {}

    def all(self) -> tuple[AttentionChoice, ...]:
        with self._lock:
            return tuple(self._found.values())

    def of(self, call: Call, rule: str) -> AttentionChoice | None:
        return self._found.get((call, rule))

    def of_kind(self, dtype: torch.dtype, rule: str, needs_grad: bool) -> str:
        """The implementation that served the last call of the kind that was measured; empty where none was."""
        return self._of_kind.get((dtype, rule, needs_grad), "")

    def add(self, choice: AttentionChoice) -> None:
        call = choice.call
        with self._lock:
            self._found[call, choice.rule] = choice
            self._of_kind[call.dtype, choice.rule, call.needs_grad] = choice.name


_CHOICES: Final = _Choices()


def attention_choices() -> tuple[AttentionChoice, ...]:
    """The implementations that attention was measured to be served by in this process, and all times; print them to
    see."""
    return _CHOICES.all()


def chosen(call: Call, tensors: Tensors, rule: Rule | None, scale: float | None) -> str:
    """The name of what serves the call of these tensors."""
    device = tensors[0].device
    names = candidates(machine_of(device.type, device.index), call)
    if len(names) == 1:
        return names[0]
    if torch.compiler.is_compiling():
        measured = _measured_of_kind(call.dtype, name_of(rule), call.needs_grad)
        return measured if measured in names else names[0]
    kind = name_of(rule)
    choice = _CHOICES.of(call, kind)
    if choice is not None and choice.name in names:
        return choice.name
    if not _may_measure(tensors):
        measured = _CHOICES.of_kind(call.dtype, kind, call.needs_grad)
        return measured if measured in names else names[0]
    seconds = measure(names, call.needs_grad, tensors, rule, scale)
    if not seconds:
        return names[0]  # which will say what is wrong
    best = min(seconds, key=lambda name: seconds[name])
    first = agreed(f"attention/{kind} {tuple(call)}", best)
    choice = AttentionChoice(call, kind, first if first in seconds else best, tuple(seconds.items()))
    _CHOICES.add(choice)
    return choice.name


def measure(
    names: Sequence[str], needs_grad: bool, tensors: Tensors, rule: Rule | None, scale: float | None = None
) -> dict[str, float]:
    """Median seconds of each, in turn, without those that fail. The tensors are read only."""

    def run() -> dict[str, float]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            leaves = [tensor.detach().requires_grad_(needs_grad) for tensor in tensors]
            times: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(_NUM_WARMUPS + NUM_ROUNDS):
                for name in tuple(times):
                    try:
                        times[name].append(_seconds(name, leaves, rule, scale))
                    except RuntimeError:
                        # It may take too much memory, or a library may be too old: the others serve.
                        del times[name]
        return {name: statistics.median(samples[_NUM_WARMUPS:]) for name, samples in times.items()}

    device = tensors[0].device
    stream = torch.cuda.current_stream(device)
    with ThreadPoolExecutor(1, "disttrain-attention") as thread:
        return thread.submit(run).result()


def _seconds(name: str, leaves: list[torch.Tensor], rule: Rule | None, scale: float | None) -> float:
    """The time of one step."""
    needs_grad = leaves[0].requires_grad
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    with torch.set_grad_enabled(needs_grad):
        result = RUNS[name](leaves[0], leaves[1], leaves[2], rule, scale)
    if needs_grad:
        torch.autograd.grad(result, leaves, torch.full_like(result, 0.5))
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def _may_measure(tensors: Tensors) -> bool:
    is_plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    return is_plain and tensors[0].is_cuda and not is_within_a_graph() and not torch.cuda.is_current_stream_capturing()


@as_constant
def machine_of(device_type: str, index: int | None) -> Machine:
    """Properties of the machine that decide, beside a call."""
    major, minor = torch.cuda.get_device_capability(index) if device_type == "cuda" else (0, 0)
    uses_triton = has_triton() and KERNELS.read() != "reference"
    return Machine(device_type, 10 * major + minor, uses_triton, torch.are_deterministic_algorithms_enabled())


@as_constant
def _measured_of_kind(dtype: torch.dtype, rule: str, needs_grad: bool) -> str:
    return _CHOICES.of_kind(dtype, rule, needs_grad)
