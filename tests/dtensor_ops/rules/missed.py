"""Signatures that torch's validator finds valid and no rule offers: shardings that go unused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch.distributed.tensor._ops import strategy_validation as validator

from disttrain.dtensor.rules import Signature
from tests.dtensor_ops.rules.calls import AtenCall
from tests.dtensor_ops.rules.judge import NUMS_RANKS, as_torchs, valid_by_torch


def missed(call: AtenCall, signatures: Sequence[Signature], num_tried: int) -> tuple[int, list[validator.ComboKey]]:
    """How many others were tried, at most `num_tried`, drawn from all there are; and which of them are valid.

    As torch does it, a dim of one element counts as whole, and all results lie in one way.
    """
    operands, results = call.operands, list(call.results)
    if not all(isinstance(result, torch.Tensor) for result in results):
        return 0, []
    shapes = tuple(tuple(one.shape) for one in operands), tuple(tuple(one.shape) for one in results)
    known = {_key(signature, shapes) for signature in signatures}
    possible = (
        list(
            itertools.product(
                itertools.product(
                    *[validator.get_1d_input_placements_for_tensor(one, include_partial=True) for one in operands]
                ),
                validator.get_1d_output_placements_for_tensor(results[0]),
            )
        )
        if len(operands) <= 4
        else []
    )
    drawn = random.Random(0).sample(possible, min(num_tried, len(possible)))
    tried, found = 0, set()
    for inputs, output in drawn:
        outputs = (output,) * len(results)
        key = validator.normalize_combo_key((tuple(map(str, inputs)), tuple(map(str, outputs))), *shapes)
        if key in known or key in found or set(key[0]) == {"R"}:
            continue
        verdicts = [valid_by_torch(call, inputs, outputs, num_ranks) for num_ranks in NUMS_RANKS]
        tried += any(verdict is not None for verdict in verdicts)
        if True in verdicts and False not in verdicts:
            found.add(key)
    return tried, sorted(found)


def _key(signature: Signature, shapes: tuple[tuple[tuple[int, ...], ...], ...]) -> validator.ComboKey | None:
    sides = [tuple(str(as_torchs(placement)) for placement in side) for side in (signature.operands, signature.results)]
    return validator.normalize_combo_key((sides[0], sides[1]), *shapes)
