"""Where a step's time on a GPU goes: its kernels sorted by what they do, told by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType

PATTERNS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated",
    "matmul": r"gemm|nvjet|cutlass|xmma|splitK|cublas",
    "optimizer": r"adam|FusedOptimizer|^_update",
    "loss": r"softmax|nll_loss|_statistics|_gradient|_combine",
    "kernels of blocks": r"^_\w*(forward|backward|turn)",
    "Inductor's": r"^triton_",
    "copies and casts": r"memcpy|memset|copy|cat|split_with_sizes|multi_tensor_apply",
}
OTHER = "other"


@dataclass(frozen=True)
class Span:
    """A kernel on the GPU, in microseconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """The first kind whose pattern is in the kernel's name."""
    return next((kind for kind, pattern in PATTERNS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def times_by_kind(spans: Iterable[Span]) -> dict[str, float]:
    """Milliseconds of kernels by kind; "exposed communication" is when nothing else ran, "idle" when nothing did.

    Kernels of one kind may run beside each other and others; what they take together may be more than the step.
    """
    every = sorted(spans, key=lambda span: span.begin)
    found: dict[str, float] = defaultdict(float)
    for span in every:
        found[kind_of(span.name)] += (span.end - span.begin) / 1e3
    busy = _covered(every)
    computing = _covered([span for span in every if kind_of(span.name) != "communication"])
    whole = max(span.end for span in every) - every[0].begin
    found["exposed communication"] = (busy - computing) / 1e3
    found["idle"] = (whole - busy) / 1e3
    found["step"] = whole / 1e3
    return dict(found)


def longest(spans: Iterable[Span], count: int) -> list[tuple[str, float, int]]:
    """The kernels, by name, that take longest: milliseconds of all calls, and how many."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_name[span.name[:110]].append((span.end - span.begin) / 1e3)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return [(name, sum(times), len(times)) for name, times in ordered[:count]]


def spans_of(profile: torch.profiler.profile) -> list[Span]:
    """What ran on the GPU."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA
        and event.time_range.end > event.time_range.start
        and not event.is_user_annotation
    ]


def _covered(ordered: Iterable[Span]) -> float:
    total, reached = 0.0, float("-inf")
    for span in ordered:
        total += max(0.0, span.end - max(reached, span.begin))
        reached = max(reached, span.end)
    return total
