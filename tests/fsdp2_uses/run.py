"""Play a program on ranks that are threads and on the plain reference, and compare them after each use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Placement, Replicate
from disttrain.dtensor import Shard as Cut
from disttrain.errors import ShardingError
from disttrain.fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    TransferPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from disttrain.testing import run_threads
from tests.fsdp2_uses.models import Node, Owner, Part, initialised, owners, parts_of, taken_together
from tests.fsdp2_uses.programs import Program
from tests.fsdp2_uses.reference import Reference
from tests.fsdp2_uses.session import Session
from tests.fsdp2_uses.uses import Rank

POLICIES = {
    "": None,
    "compute": MixedPrecisionPolicy(param_dtype=torch.float32),
    "reduce": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "both": MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64),
    "no cast": MixedPrecisionPolicy(torch.float32, cast_forward_inputs=False),
}
TRANSFERS = {
    "": None,
    "in place": TransferPolicy("in_place"),
    "apart": TransferPolicy(reduces_apart=True),
    "pairs": TransferPolicy("flat", together=2),
    "all as one": TransferPolicy(together=99, reduces_apart=True),
}


@dataclass(frozen=True)
class Step:
    """What a rank had after a use."""

    result: Any
    state: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    calls: list[str]
    error: Exception | None = None


def shard(model: Part, mesh: disttrain.DeviceMesh) -> Part:
    """Call `fully_shard` on each part that is to be sharded, the innermost first."""
    ignored = {parameter for parameter in model.parameters() if parameter.ndim == 0}

    def last_dim(parameter: nn.Parameter) -> Placement:
        return Cut(parameter.ndim - 1)

    for part in reversed(parts_of(model)):
        how = part.node.shard
        if how is None:
            continue
        target: Any = taken_together(part) if how.together else part
        if how.together and not target:
            continue
        fully_shard(
            target,
            mesh=mesh,
            reshard_after_forward=how.reshard,
            mp_policy=POLICIES[how.policy],
            shard_placement_fn=last_dim if how.cuts_last else None,
            ignored_params=ignored,
            offload_policy=CPUOffloadPolicy(pin_memory=False) if how.on_host else None,
            transfer_policy=TRANSFERS[how.transfers],
        )
    register_fsdp_forward_method(model, "extra")
    return model


def state_of(session: Session) -> dict[str, Any]:
    """All parameters that the user sees, with their gradients: as they are, and this rank's part of them."""
    return {name: (_seen(p), _seen(p.grad), p.requires_grad) for name, p in session.model.named_parameters()}


def _seen(tensor: torch.Tensor | None) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.shape, tensor.to_local().detach().clone()
    if tensor is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
        return "a tensor without memory"
    return None if tensor is None else tensor.detach().clone()


def play(program: Program) -> list[Step]:
    """On this rank."""
    names = ("copies", "ranks")[-len(program.mesh) :]
    mesh = disttrain.init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
    session = Rank(program, shard(initialised(program.model, program.seed), mesh), mesh.get_rank())
    steps: list[Step] = []
    while len(steps) < len(program.uses) and (not steps or steps[-1].error is None):
        result, error = None, None
        session.calls.clear()
        session.is_refused = False
        try:
            result = session.do(program.uses[len(steps)])
        except Exception as raised:  # noqa: BLE001 -- judged by `check`
            error = raised
        state = {} if error is not None else state_of(session)
        buffers = {name: buffer.clone() for name, buffer in session.model.named_buffers()}
        steps.append(Step(result, state, buffers, sorted(session.calls), error))
    return steps


class Difference(AssertionError):
    """What a program has done otherwise than the reference. Programs with the same fault have it of one `kind`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def check(program: Program, timeout_s: float = 20.0) -> None:
    """Raise `Difference` where sharded ranks do otherwise than plain ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_rank = run_threads(program.num_ranks, play, program, timeout_s=timeout_s)
        reference = Reference(program)
        for number, use in enumerate(program.uses):
            found = [steps[number] for steps in by_rank if number < len(steps)]
            wanted, error = None, None
            had_fresh = bool(reference.ranks[0].fresh)
            refused = all(isinstance(step.result, str) and step.result == "refused" for step in found)
            try:
                wanted = reference.do(use, is_refused=refused)
            except Exception as raised:  # noqa: BLE001 -- ranks must have raised it, too
                error = raised
            if had_fresh and (refused or all(isinstance(step.error, ShardingError) for step in found)):
                return
            try:
                _compare_errors([step.error for step in found], error, program.num_ranks)
                if wanted is None:
                    return
                for rank, (step, result) in enumerate(zip(found, wanted, strict=True)):
                    _Comparison(program, reference, rank).check(step, result)
            except Difference as difference:
                difference.add_note(f"after use {number}, {use}")
                raise


def _compare_errors(found: list[Exception | None], wanted: Exception | None, num_ranks: int) -> None:
    raised = [error for error in found if error is not None]
    if not raised and wanted is None and len(found) == num_ranks:
        return
    if wanted is not None and len(raised) == num_ranks and all(type(error) is type(wanted) for error in raised):
        return
    # A rank that is left alone says so; what the others say comes first.
    raised.sort(key=lambda error: "deadlock" in str(error).lower())
    said = " | ".join(f"{type(error).__name__}: {error}" for error in raised) or "nothing"
    kind = f"{type(raised[0]).__name__ if raised else 'nothing'} raised"
    raise Difference(kind, f"{said}; the reference: {wanted!r}") from (raised[0] if raised else wanted)


class _Comparison:
    """Of a rank's step with the reference after the same use."""

    def __init__(self, program: Program, reference: Reference, rank: int) -> None:
        self._plain = reference.ranks[rank]
        self._rank = rank
        self._num_shards = program.mesh[-1]
        self._num_axes = len(program.mesh)
        self._tolerance = 2e-3 if is_narrow(program.model) else 1e-9
        self._is_reentrant = any(part.node.kind == "recomputed reentrant" for part in parts_of(self._plain.model))

    def check(self, step: Step, result: Any) -> None:
        self._same("result", "what it gave", step.result, result)
        wanted = self._plain.state()
        if list(step.state) != list(wanted):
            raise Difference("other parameters", f"{list(step.state)}, not {list(wanted)}")
        taken = owners(self._plain.model)
        for name, (parameter, grad, asks) in wanted.items():
            seen, seen_grad, seen_asks = step.state[name]
            if seen_asks != asks:
                raise Difference("other requires_grad", f"{name} has {seen_asks}")
            may_be_whole = (self._plain.is_unsharded or name in self._plain.fresh) and not isinstance(seen, tuple)
            owner = None if may_be_whole else taken[name]
            if may_be_whole and seen is not None:
                # As it is computed with.
                seen = seen.to(parameter.dtype)
            self._same_part("parameter", name, owner, seen, parameter)
            if not may_be_whole:
                self._same_part("gradient", name, owner, seen_grad, grad)
        # A backward within a backward ends with calls of its own.
        as_told: Callable[[list[str]], Iterable[str]] = set if self._is_reentrant else list
        calls, wanted_calls = sorted(as_told(step.calls)), sorted(as_told(self._plain.calls))
        if calls != wanted_calls:
            raise Difference("calls of hooks", f"{calls}, not {wanted_calls}")
        self._same("buffer", "one", step.buffers, dict(self._plain.model.named_buffers()))

    def _same_part(self, what: str, name: str, owner: Owner | None, found: Any, wanted: torch.Tensor | None) -> None:
        """A shard is the rank's part, with the placements that were asked for."""
        if owner is None or wanted is None or not isinstance(found, tuple):
            if isinstance(found, tuple):
                raise Difference(f"{what} sharded", f"{name}; the reference has {wanted}")
            if owner is not None and wanted is not None:
                raise Difference(f"{what} not {'there' if found is None else 'sharded'}", f"{name} is {found}")
            self._same(what, name, found, wanted)
            return
        dim = wanted.ndim - 1 if owner.shard.cuts_last else 0
        placements, shape, local = found
        expected = (Replicate(),) * (self._num_axes - 1) + (Cut(dim),)
        if placements != expected or shape != wanted.shape:
            raise Difference(f"{what} lies otherwise", f"{name} has placements {placements} and shape {shape}")
        size = wanted.shape[dim]
        rows = -(-size // self._num_shards)
        first = min(rows * (self._rank % self._num_shards), size)
        self._same(what, name, local, wanted.narrow(dim, first, min(rows, size - first)))

    def _same(self, what: str, name: str, found: Any, wanted: Any) -> None:
        if isinstance(found, str) and found in ("refused", wanted):
            return
        try:
            torch.testing.assert_close(found, wanted, rtol=self._tolerance, atol=self._tolerance, equal_nan=True)
        except (AssertionError, TypeError) as error:
            if found is None and wanted is None:
                return
            said = f"{name} on rank {self._rank}: {error}\nfound {found}\nwanted {wanted}"
            raise Difference(f"{what} wrong", said) from None


def is_narrow(node: Node) -> bool:
    """True where something is computed in float32."""
    is_own = node.kind == "narrow" or (node.shard is not None and node.shard.policy != "")
    return is_own or any(map(is_narrow, node.children))
