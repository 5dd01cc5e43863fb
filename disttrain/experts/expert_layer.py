"""The base of all layers of experts: tokens go to their experts, and what comes back is summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from disttrain.autocast import is_within_autocast
from disttrain.dtensor import DTensor, Partial, Placement
from disttrain.experts.crossing import GatedExperts, can_cross, crossed, taken_whole
from disttrain.experts.exchange.asked import Asked, asked_for, taking_part
from disttrain.experts.exchange.base import Exchange
from disttrain.experts.exchange.dispatch import (
    Sending,
    begin_dispatch,
    check_arguments,
    combine,
    most_rows,
    ordered,
)
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.graphs import REASON, out_of_graphs
from disttrain.experts.hidden_cut import HiddenCut
from disttrain.experts.tensor_parallel import ExpertTensorParallel
from disttrain.kernels.float8.reference import LINE
from disttrain.kernels.grouped.rows import ExpertOrder, combine_rows, take_rows
from disttrain.mesh import DeviceMesh
from disttrain.tp import ParallelStyle


class ExpertLayer(nn.Module):
    """Experts that `shard_experts` can divide among ranks; subclasses compute them on rows that are sorted."""

    exchange: Exchange | None = None
    """Between the ranks that share the experts; None where all are here."""
    hidden_cut: HiddenCut | None = None
    """Between the ranks that share each expert; None where an expert is on one."""
    capacity: float | None = None
    """An expert takes at most so many times its even share of each rank's assignments; None: all."""
    float8: str = ""
    """The recipe by which rows and weights are multiplied, "tensorwise" or "rowwise": see `use_float8`."""
    num_dropped: torch.Tensor | None = None
    """() on the device: this rank's assignments that found no room in the last forward; None without a capacity."""

    @property
    def breaks_graphs(self) -> str:
        """Why no graph can hold all of the layer, which `compile_blocks` asks; empty where one can."""
        return "" if self.exchange is None else REASON

    def count_experts(self) -> int:
        """The experts of all ranks."""
        raise NotImplementedError

    def count_experts_here(self) -> int:
        """Those of this rank."""
        if self.exchange is None:
            return self.count_experts()
        group = self.exchange.group
        return ExpertCut.of(self.count_experts(), group.group_size).num_experts_of(group.group_rank)

    def expert_width(self) -> int:
        """The columns of the rows that experts take."""
        raise NotImplementedError

    def expert_dtype(self) -> torch.dtype | None:
        """That of the rows that experts take; None where it is not asked."""
        return None

    def expert_tensors(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Parameters whose dim 0 is the experts', with the modules that have them and their names there."""
        for name, parameter in self.named_parameters(recurse=False):
            yield self, name, parameter

    def hidden_cuts(self) -> Sequence[Placement] | None:
        """The cut of each of `expert_tensors` along the hidden dim of experts; None where they cannot be."""
        return None

    def float8_obstacle(self) -> str:
        """Why products cannot be in float8, which `use_float8` asks; empty where they can."""
        return "their products have no form in float8"

    def style_along_hidden(self, *, cuts_tokens: bool) -> ParallelStyle | None:
        """The style that tp.plan_for proposes; None where the layer stays whole."""
        return None if self.hidden_cuts() is None else ExpertTensorParallel(cuts_tokens=cuts_tokens)

    def keep_part(self, mesh: DeviceMesh, src_data_rank: int | None) -> None:
        """Drop the other ranks' experts of those that are tensors of their own. Collective: every rank of the axis."""

    def trains_elsewhere(self) -> bool:
        """True if experts of other ranks may be trained, whatever those of this one are."""
        return False

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """This rank's experts on rows that are sorted by them."""
        raise NotImplementedError

    def gated_experts(self) -> GatedExperts | None:
        """This rank's experts, where it has some and they are nothing but gated layers."""
        return None

    def mix(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """
        Args:    x  (tokens, D);  indices, weights  (tokens, k), of each token's experts.
        Returns: (tokens, D), the sum of what a token's experts compute, by their weights.
        Raises:  ShapeError when shapes or dtypes don't fit, or, with other ranks, weights are not finite.
        Collective: every rank of the axis that the experts lie along, and again in backward.
        """
        if self.exchange is None:
            num_experts = self.count_experts()
            check_arguments(x, indices, num_experts, None, weights, self.expert_width(), dtype=self.expert_dtype())
            if self.hidden_cut is not None:
                x, indices, weights = self.hidden_cut.entering_all(x, indices, weights)
            order, num_dropped = ordered(indices, num_experts, self.capacity)
            self._keep_dropped(num_dropped)
            sums = self.mix_here(x, order, weights)
            return sums if self.hidden_cut is None else self.hidden_cut.leaving(sums)
        result: torch.Tensor = self._mix_over_ranks(x, indices, weights)
        return result

    @out_of_graphs
    def _mix_over_ranks(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        asked = 0 if x.requires_grad else self._asked_for(x, weights)
        experts = None if asked > Asked.EXPERTS or is_within_autocast(x.device) else self.gated_experts()
        if experts is None or not can_cross(x, weights, experts):
            sending = self.begin(x, indices, weights)
            sending.send()
            return self.finish(sending)
        if self.hidden_cut is not None:
            x, indices, weights = self.hidden_cut.entering_all(x, indices, weights)
        num_experts, exchange, capacity = self.count_experts(), self.exchange, self.capacity
        assert exchange is not None
        check_arguments(x, indices, num_experts, exchange, weights, self.expert_width(), capacity, self.expert_dtype())
        order, num_dropped = ordered(indices, num_experts, capacity)
        self._keep_dropped(num_dropped)
        most = most_rows(indices, num_experts, exchange, capacity)
        route = exchange.route(x, order, num_experts, weights, most, asked)
        if asked:
            x, _ = taking_part(x, weights, route.agreed(asked))
        sums = crossed(x, order, weights, route, experts)
        return sums if self.hidden_cut is None else self.hidden_cut.leaving(sums)

    def mix_here(self, x: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
        """The forward where all experts are here, and tokens are sorted already."""
        rows = self.compute(take_rows(x, order, weights.shape[1]), order.ends)
        return combine_rows(rows, order, weights)

    def begin(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *, beside: bool = False) -> Sending:
        """Begin to send tokens to their experts: `send` of the result goes on with that, `finish` computes.

        `beside`: something is computed before `finish`, while rows are under way.
        """
        if self.hidden_cut is not None:
            x, indices, weights = self.hidden_cut.entering_all(x, indices, weights)
        return begin_dispatch(
            x,
            indices,
            self.count_experts(),
            self.exchange,
            weights,
            capacity=self.capacity,
            width=self.expert_width(),
            dtype=self.expert_dtype(),
            beside=beside,
            asked=self._asked_for(x, weights),
        )

    def _asked_for(self, x: torch.Tensor, weights: torch.Tensor) -> int:
        """What backward asks for of the exchange."""
        if self.exchange is None:
            return Asked.TOKENS
        trains_experts = any(parameter.requires_grad for parameter in self.parameters())
        if not self.exchange.agrees:
            trains_experts = trains_experts or self.trains_elsewhere()
        return asked_for(x, weights, trains_experts=trains_experts)

    def _keep_dropped(self, num_dropped: torch.Tensor | None) -> None:
        # To set what is there already takes a module as long as to check a layer's arguments.
        if self.num_dropped is not num_dropped:
            self.num_dropped = num_dropped

    def finish(self, sending: Sending) -> torch.Tensor:
        """Compute the experts on the rows that have come, and give each token its own."""
        dispatched = sending.arrived()
        self._keep_dropped(dispatched.num_dropped)
        assert sending.weights is not None
        rows = self.compute(dispatched.rows, dispatched.ends)
        if sending.asked == Asked.EXPERTS and not rows.requires_grad:
            # The others send this rank gradients in backward, and wait for its own.
            rows = rows.detach().requires_grad_()
        sums = combine(rows, dispatched, sending.weights)
        return sums if self.hidden_cut is None else self.hidden_cut.leaving(sums)


def float8_sizes(*sizes: int) -> str:
    """Why matrices with these sizes are not multiplied in float8, or nothing."""
    return f"sizes are no multiples of {LINE}" if any(size % LINE for size in sizes) else ""


def without_experts(rows: torch.Tensor, parts: Iterable[torch.Tensor | None] = ()) -> torch.Tensor:
    """The results of a rank that has no experts, and so no rows: of the dtype that those of other ranks have, and with
    a backward, in which ranks exchange rows, through its empty parts of experts' parameters."""
    if is_within_autocast(rows.device) and rows.dtype != torch.float64:
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    return rows + sum((part.sum() for part in parts if part is not None), rows.new_zeros(()))


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, through which its gradient goes."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def crossing_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, or the parameter, of which a crossing takes the part itself."""
    return parameter if taken_whole(parameter) else local_part(parameter)


def local_share(bias: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """This rank's term of a bias of outputs: a share of it where ranks sum up what they have of these."""
    hidden_cut: HiddenCut | None = getattr(layer, "hidden_cut", None)
    if hidden_cut is None or not isinstance(bias, DTensor):
        return local_part(bias)
    grads = [Partial() if placement.cut_dim is None else placement for placement in bias.placements]
    return bias.to_local(grad_placements=grads) / hidden_cut.mesh.size()
