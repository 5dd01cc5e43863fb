"""Every `_foreach_` operator of torch's table, with scalars of each kind, on lists of two DTensors of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.spec.placement import NormPartial
from disttrain.errors import LayoutError
from disttrain.testing import run_threads
from tests.cases.shardings import mesh_of
from tests.cases.writes import KINDS, in_parts

MAY_REFUSE = {"aten::_foreach_max", "aten::_foreach_powsum"}
"""Those that reduce, but for norms."""

_SCALARS: dict[str, Any] = {
    "List[number]": [-1.5, 0.75],
    "Optional[number]": -0.5,
    "Tensor": torch.tensor(1.5, dtype=torch.float64),
    "bool": False,
}


def operators() -> Iterator[OpOverload]:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "aten::_foreach_" in name
    }
    for name in sorted(names - {"_foreach_mm"}):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            if not any(argument.is_out for argument in arguments) and str(arguments[0].type) == "List[Tensor]":
                yield op


def numbers(seed: int) -> torch.Tensor:
    return torch.rand(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def written(kind: Placement) -> list[torch.Tensor]:
    wholes = [numbers(seed) * 4 - 2 for seed in (1, 2)]
    return [whole.abs() + 0.1 for whole in wholes] if isinstance(kind, NormPartial) else wholes


def others_of(op: OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """The arguments after the first."""
    values: list[Any] = []
    for place, argument in enumerate(op._schema.arguments[1:], 1):
        if argument.kwarg_only or argument.name == "dtype":
            continue
        kind = str(argument.type)
        if kind == "List[Tensor]":
            values.append([numbers(10 * place), numbers(10 * place + 1)])
        elif argument.name == "scalars" and kind == "Tensor":
            values.append(torch.tensor([-1.5, 0.75], dtype=torch.float64))
        else:
            values.append(_SCALARS.get(kind, 2.0 if argument.name in ("ord", "exponent") else -1.5))
    has_alpha = any(argument.name == "alpha" for argument in op._schema.arguments)
    return values, {"alpha": -1.5} if has_alpha else {}


def faults(op: OpOverload, kind: Placement, lay: Callable[[torch.Tensor], DTensor], mesh: Any) -> Iterator[str]:
    plain, (others, keywords) = written(kind), others_of(op)
    expected = op([*plain], *others, **keywords)
    is_write = op._schema.arguments[0].alias_info is not None
    ways = [lambda whole: distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None), lay]
    for lay_others in ways if any(map(_is_list_of_tensors, others)) else ways[:1]:
        tensors = [lay(whole) for whole in written(kind)]
        arguments = [[*map(lay_others, value)] if _is_list_of_tensors(value) else value for value in others_of(op)[0]]
        try:
            found = op([*tensors], *arguments, **keywords)
        except LayoutError as error:
            if op._schema.name not in MAY_REFUSE:
                yield f"{op} on {kind}: {error}"
            continue
        for tensor, wanted in zip(tensors if is_write else found, plain if is_write else expected, strict=True):
            if not torch.allclose(tensor.full_tensor(), wanted, equal_nan=True):
                yield f"{op} on {kind}: {tensor.full_tensor().tolist()} instead of {wanted.tolist()}"


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], torch.Tensor)


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, Shard(0), Shard(1), Replicate()], ids=str)
def test_every_operator_on_lists(kind: Placement) -> None:
    def body() -> list[str]:
        mesh = mesh_of((2,))

        def lay(whole: torch.Tensor) -> DTensor:
            if isinstance(kind, Partial):
                return in_parts(whole, kind, mesh)
            return distribute_tensor(whole, mesh, [kind], src_data_rank=None)

        return [fault for op in operators() for fault in faults(op, kind, lay, mesh)]

    assert len([*operators()]) > 130
    assert run_threads(2, body) == [[], []]
