"""register_sharding: rules that users write for their own operators, or in place of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.call_plan import replaced
from disttrain.dtensor.rules import CUSTOM, OpCall, Rule, Signature, all_replicated
from disttrain.dtensor.spec.layout import forget_plans
from disttrain.dtensor.spec.placement import Placement
from disttrain.errors import LayoutError

Shardings = Sequence[tuple[Sequence[Placement | None], Sequence[Placement | None]]]
"""Per choice along one mesh axis: placements of the results, and of the arguments, None for what is no tensor."""


def register_sharding(
    op: OpOverload | list[OpOverload],
) -> Callable[[Callable[..., Shardings]], Callable[..., Shardings]]:
    """Decorate a function that says how `op` (or each of several) may be sharded.

    It is called with the operator's arguments, of which DTensors are `Spec`s (shape, dtype, ndim), and returns the
    choices along one mesh axis; any partition of a dim must do. It takes the place of a rule that is there. All ranks
    register the same.

        @register_sharding(torch.ops.mylib.double.default)
        def shard_double(x):
            return [([Replicate()], [Replicate()]), *[([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim)]]
    """
    ops = op if isinstance(op, list) else [op]

    def register(choices: Callable[..., Shardings]) -> Callable[..., Shardings]:
        for each in ops:
            CUSTOM[each] = Rule(lambda call: _signatures(call, choices), reads_numbers=True)
        # What was planned by the old rule must not be found any more.
        forget_plans()
        return choices

    return register


def _signatures(call: OpCall, choices: Callable[..., Shardings]) -> list[Signature]:
    specs: list[Any] = list(call.operands)
    args, kwargs = replaced(call.arguments, call.keywords, specs)
    signatures = []
    for results, arguments in choices(*args, **kwargs):
        operands = [placement for placement in arguments if placement is not None]
        placements = [placement for placement in results if placement is not None]
        if len(operands) != len(specs) or len(placements) != len(call.outputs):
            raise LayoutError(
                call.facts.name,
                f"a registered sharding has {len(operands)} operands and {len(placements)} results; the operator has "
                f"{len(specs)} and {len(call.outputs)}.",
                "Give one placement per tensor, and None for every other argument.",
            )
        signatures.append(Signature(tuple(operands), tuple(placements)))
    return [*signatures, all_replicated(call)]
