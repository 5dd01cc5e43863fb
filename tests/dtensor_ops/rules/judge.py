"""Whether a signature that a rule offers is true: by torch's validator, and by running the rule's parts on ranks.

torch's validator runs the bare operator on parts of equal size. A rule may do more than that (`localize`), and cut
unevenly: so each signature is judged on two ranks as well, each of which computes as the rule says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._ops import strategy_validation as validator
from torch.distributed.tensor.placement_types import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

import disttrain
from disttrain.dtensor import Layout, Partial, Placement, Replicate, Shard
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.rules import Propagation, Rule, Signature
from disttrain.dtensor.spec.placement import NormPartial
from disttrain.dtensor.spec.shard_sizes import num_blocks
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore
from disttrain.testing import run_threads
from tests.dtensor_ops.rules.calls import AtenCall
from tests.dtensor_ops.rules.parts import NoParts, parts_of, whole_of
from tests.dtensor_ops.rules.signatures import offered, planned

NUMS_RANKS = (2, 5)
"""Where parts must be of one size, the first that divides; most samples of torch are of size 5 or 10."""


@dataclass
class Verdicts:
    """Of one call's signatures."""

    call: AtenCall
    signatures: dict[Signature, None] = field(default_factory=dict)
    num_by_torch: int = 0
    not_by_torch: Counter[str] = field(default_factory=Counter)
    """Why torch's verdict on some does not count."""
    num_by_ranks: int = 0
    untested: list[Signature] = field(default_factory=list)
    wrong: list[tuple[Signature, str, str]] = field(default_factory=list)
    """A signature, who says so ("torch" or "ranks"), and why."""


def judge(call: AtenCall) -> Verdicts | None:
    """Judge all that the call's rule offers; None where it has none."""
    verdicts = Verdicts(call)
    by_ranks: set[Signature] = set()
    by_torch: set[Signature] = set()
    for num_ranks in NUMS_RANKS:
        with _alone(num_ranks) as mesh:
            plan = planned(call, mesh, [Replicate() for _ in call.operands])
            signatures = offered(call, mesh)
        if plan is None or signatures is None:
            return None
        verdicts.signatures.update(dict.fromkeys(signatures))
        for signature in signatures:
            for who, judged, fault_of in (("ranks", by_ranks, _fault_on_ranks), ("torch", by_torch, _fault_by_torch)):
                fault = None if signature in judged else fault_of(call, plan[1], signature, num_ranks)
                if fault is not None:
                    judged.add(signature)
                if fault:
                    verdicts.wrong.append((signature, who, fault))
    reasons = [why_not_torch(call, signature) for signature in verdicts.signatures if signature not in by_torch]
    verdicts.not_by_torch.update(reason for reason in reasons if reason)
    verdicts.num_by_ranks, verdicts.num_by_torch = len(by_ranks), len(by_torch)
    verdicts.untested = [signature for signature in verdicts.signatures if signature not in by_ranks | by_torch]
    return verdicts


@contextmanager
def _alone(num_ranks: int) -> Iterator[disttrain.DeviceMesh]:
    """A mesh of which the other ranks are not there."""
    world = World(HashStore(), 0, num_ranks, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(world):
        yield disttrain.init_device_mesh("cpu", (num_ranks,))


def _fault_on_ranks(call: AtenCall, rule: Rule, signature: Signature, num_ranks: int) -> str | None:
    """What is wrong with what the rule's parts make up; "" for nothing, None where there are no parts to try."""
    if signature.for_one_rank:
        num_ranks = 1
    if not (rule.shards_unevenly or _is_even(call, signature, num_ranks)):
        return None
    shifts = (0, 1) if any(isinstance(placement, Partial) for placement in signature.operands) else (0,)
    fault = None
    for given in (call, _negated(call)) if len(shifts) > 1 else (call,):
        for mask_shift in shifts if given is not None else ():
            with suppress(NoParts):
                fault = _fault_of_parts(given, signature, num_ranks, mask_shift)
                if fault:
                    return fault
    return fault


def _negated(call: AtenCall) -> AtenCall | None:
    """The call with other signs, where the operator takes such operands: "larger" becomes "smaller"."""
    if not all(operand.is_floating_point() for operand in call.operands):
        return None
    try:
        return call.with_operands([-operand for operand in call.operands])
    except (RuntimeError, ValueError, IndexError):
        return None


def _fault_of_parts(call: AtenCall, signature: Signature, num_ranks: int, mask_shift: int) -> str:
    operands = [
        parts_of(operand, placement, num_ranks, place, mask_shift)
        for place, (operand, placement) in enumerate(zip(call.operands, signature.operands, strict=True))
    ]
    try:
        results = run_threads(num_ranks, _results_on_rank, call, signature, operands, timeout_s=100.0)
        for place, (expected, placement) in enumerate(zip(call.results, signature.results, strict=True)):
            if isinstance(expected, torch.Tensor):
                parts = [result[place] for result in results]
                found = whole_of(parts, placement, expected.shape)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    except Exception as error:  # noqa: BLE001 -- whatever goes wrong is the verdict
        return f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return ""


def _results_on_rank(call: AtenCall, signature: Signature, operands: Sequence[Sequence[torch.Tensor]]) -> Any:
    mesh = disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),))
    plan = planned(call, mesh, signature.operands)
    assert plan is not None
    seen, rule = plan
    propagation = Propagation(
        tuple(Layout(mesh, [placement]) for placement in signature.operands),
        tuple(Layout(mesh, [placement]) for placement in signature.results),
    )
    compute = seen.op if rule.localize is None else rule.localize(seen, propagation)
    parts = [operand[disttrain.get_rank()] for operand in operands]
    if rule.fetch is not None and (fetch := rule.fetch(seen, propagation)) is not None:
        parts[0] = fetch.read(parts[0])
    return call.run(parts, compute)


def _is_even(call: AtenCall, signature: Signature, num_ranks: int) -> bool:
    return not any(
        operand.shape[placement.cut_dim] % (num_ranks * num_blocks(placement))
        for operand, placement in zip(call.operands, signature.operands, strict=True)
        if placement.cut_dim is not None
    )


def _fault_by_torch(call: AtenCall, rule: Rule, signature: Signature, num_ranks: int) -> str | None:
    """What torch's validator says: "" for valid, None where it has nothing to say."""
    placements = [as_torchs(placement) for placement in (*signature.operands, *signature.results)]
    if None in placements or rule.localize is not None or rule.fetch is not None or signature.for_one_rank:
        return None
    if not _is_even(call, signature, num_ranks) or why_not_torch(call, signature):
        return None
    is_valid = valid_by_torch(call, placements[: len(call.operands)], placements[len(call.operands) :], num_ranks)
    return None if is_valid is None else "" if is_valid else f"not valid on {num_ranks} ranks"


def why_not_torch(call: AtenCall, signature: Signature) -> str | None:
    """Why torch's validator does not count here, though it would have something to say."""
    return next((why for why, applies in MISTAKEN.items() if applies(call, signature)), None)


def _makes_floats(call: AtenCall, signature: Signature) -> bool:
    return any(
        isinstance(placement, Partial) and not operand.is_floating_point()
        for operand, placement in zip(call.operands, signature.operands, strict=True)
    )


def _shares_infinity(call: AtenCall, signature: Signature) -> bool:
    return any(
        isinstance(placement, Partial) and not bool(operand.isfinite().all())
        for operand, placement in zip(call.operands, signature.operands, strict=True)
    )


def _has_nan(call: AtenCall, _: Signature) -> bool:
    return any(isinstance(result, torch.Tensor) and bool(result.isnan().any()) for result in call.results)


def _returns_others(call: AtenCall, _: Signature) -> bool:
    return not all(isinstance(result, torch.Tensor) for result in call.results)


MISTAKEN: dict[str, Callable[[AtenCall, Signature], bool]] = {
    "it makes floats of integers and booleans that are partial": _makes_floats,
    "it shares out what is not finite": _shares_infinity,
    "it takes nan for unequal to itself where ranks hold the same": _has_nan,
    "it refuses results that are no tensors": _returns_others,
    "it calls operators that write to an operand with what an earlier call has written": (
        lambda call, _: bool(dispatch.facts(call.op).mutated)
    ),
}
"""Where torch's validator is wrong, or mute: on ranks, such signatures are judged all the same."""


def as_torchs(placement: Placement) -> TorchPlacement | None:
    """torch's placement of the same meaning, among those that its validator knows."""
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    if isinstance(placement, Partial) and not isinstance(placement, NormPartial):
        return TorchPartial(placement.reduce_op) if placement.reduce_op in validator.PARTIAL_REDUCE_OPS else None
    return TorchReplicate() if isinstance(placement, Replicate) else None


def valid_by_torch(call: AtenCall, operands: Any, results: Any, num_ranks: int) -> bool | None:
    """The validator's verdict; None where it has none."""
    truth = list(call.results) if len(call.results) > 1 else call.results[0]
    mitigations = validator._prepare_aten_mitigations(call.op, *_copies(call))
    with LocalTensorMode(frozenset(range(num_ranks))):
        mesh = init_device_mesh("cpu", (num_ranks,))
        return validator._validate_aten_with_mitigations(
            call.op, call.args, call.kwargs, tuple(operands), tuple(results), truth, num_ranks, mesh, mitigations
        )


def _copies(call: AtenCall) -> tuple[Any, Any]:
    """Arguments that an operator may write to."""
    copied = call.with_operands([operand.clone() for operand in call.operands])
    return copied.args, copied.kwargs
