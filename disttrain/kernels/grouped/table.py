"""The functions on rows that are sorted by expert, each of which the reference and Triton's kernels have alike."""

from __future__ import annotations

from typing import Protocol

import torch

from disttrain.kernels.grouped.form import GatedForm


class Kernels(Protocol):
    """A module with all of them. `reference.py` says what each computes, and judges the others.

    Nobody may read what lies past the last end of what they return, where only `take` and `clear_past` write zeros.
    """

    def sort(self, experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def take(
        self, x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, k: int, scales: torch.Tensor | None
    ) -> torch.Tensor: ...

    def combine(
        self, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int, weights: torch.Tensor | None
    ) -> torch.Tensor: ...

    def products_with(
        self, grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, k: int
    ) -> torch.Tensor: ...

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, is_transposed: bool
    ) -> torch.Tensor: ...

    def outer(self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...

    def clear_past(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...

    def add_bias(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor,
        ends: torch.Tensor,
        order: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def bias_grad(
        self,
        grad: torch.Tensor,
        bias: torch.Tensor,
        ends: torch.Tensor,
        order: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def gated(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        ends: torch.Tensor,
        form: GatedForm,
        order: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def gated_backward(
        self,
        grad: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        ends: torch.Tensor,
        form: GatedForm,
        order: torch.Tensor | None,
        weights: torch.Tensor | None,
        grad_gate: torch.Tensor,
        grad_up: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
