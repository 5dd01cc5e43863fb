"""The interface of the ways to exchange rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, Self

import torch

from disttrain.experts.exchange.legs import Route
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.process_group import ProcessGroup

NAME: Final = "experts"
"""In errors."""


class Exchange(ABC):
    """A way to exchange rows between the ranks of a group. A model's layers share one, which makes a route per call."""

    agrees = False
    """Whether routes let ranks agree on what backward passes ask for."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, _: object) -> Self:
        """Itself: copies of a module send over the same group."""
        return self

    @abstractmethod
    def route(
        self,
        x: torch.Tensor,
        order: ExpertOrder,
        num_experts: int,
        weights: torch.Tensor | None,
        most_rows: int,
        asked: int = 0,
    ) -> Route:
        """Begin a route for one call of a layer. Collective, as all that is done with it.

        Args: x          the tokens: all ranks raise where their dtypes differ.
              order      of this rank's assignments, by all ranks' experts.
              weights    the assignments' weights: all ranks raise where one's are not finite, if the host looks.
              most_rows  that this rank may send to one rank, whatever its tokens choose.
              asked      what its backward asks for, `Asked`, which the route lets ranks agree on if the host looks.
        """

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream on which rows are sent while others compute."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream
