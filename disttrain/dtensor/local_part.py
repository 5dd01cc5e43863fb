"""Typed access to what a DTensor holds, for code to which it is a tensor like others."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final

import torch

from disttrain.dtensor.spec.layout import Spec

local_part: Final[Callable[[torch.Tensor], torch.Tensor]] = attrgetter("_local_tensor")
"""This rank's part of a DTensor, without autograd's history. That of a view copy may be out of date."""

spec_of: Final[Callable[[torch.Tensor], Spec]] = attrgetter("_spec")
"""The layout, shape and dtype of a DTensor. Raises AttributeError for a plain tensor."""
