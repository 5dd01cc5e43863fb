"""Saves while training goes on: values are staged at once, and a separate process writes them and agrees with the
others.

In steady state a save takes one request to the store and no waiting: the plan of the last save is valid as long as this
rank's state has the same names, shapes and placements. The writers check that all ranks used the same plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import xxhash
from torch.optim import Optimizer

from disttrain._python.garbage import uncollected
from disttrain.checkpoint.async_saving.job import Job
from disttrain.checkpoint.async_saving.pending import PendingSave
from disttrain.checkpoint.async_saving.session import Session, Turn
from disttrain.checkpoint.async_saving.staging import Stager
from disttrain.checkpoint.async_saving.submission import Slot, Submission, as_ours
from disttrain.checkpoint.memory.peer_memory import NodeMemory
from disttrain.checkpoint.outline import Outline
from disttrain.checkpoint.plan import RankPlan, plan_save
from disttrain.checkpoint.saving.alike import shared_names
from disttrain.checkpoint.saving.commit import Contents, Target
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.saving.copies_compared import digest_of_all, warn_of_copies
from disttrain.checkpoint.saving.digests import Digests
from disttrain.checkpoint.saving.save import (
    all_outlines,
    contents_of,
    digest_of,
    findings,
    items_of,
    look_at,
    metadata_of,
    packed_groups,
    warn_of_no_tensor,
)
from disttrain.checkpoint.saving.writer import image_of, in_file_order
from disttrain.checkpoint.state.taking_apart import take_apart
from disttrain.checkpoint.state.tree import Tree
from disttrain.checkpoint.storage.base import LocalStorage, Portable, Storage
from disttrain.checkpoint.storage.claims import Claim
from disttrain.errors import CheckpointError
from disttrain.process_group import World
from disttrain.store.connection.handover import store_to_plain

WhenBusy = Literal["wait", "skip", "newest"]


@dataclass(frozen=True)
class _Plan:
    """The part that this rank writes, valid while its outline has the digest `local_digest`. `digest` is equal on all
    ranks; `shared`: see `shared_names`; `copies`: likewise of plain tensors; `differing`: those that were not alike
    when it was made."""

    local_digest: bytes
    digest: bytes
    part: RankPlan
    contents: Contents | None
    shared: list[tuple[int, list[str]]]
    copies: list[tuple[int, list[str]]]
    differing: list[str]

    def has_missed(self, ended: Iterable[PendingSave]) -> bool:
        """True if tensors have come to differ among ranks since the plan was made."""
        return not {name for save in ended for name in save.differing} <= {*self.differing}


class AsyncSaver:
    """Makes asynchronous saves one after the other, two at most at a time; what happens at a third: `when_busy`."""

    def __init__(self, storage: Storage, when_busy: WhenBusy, memory: NodeMemory | None = None) -> None:
        self._storage = storage
        self._memory = memory
        self._when_busy = when_busy
        self._stager = Stager()
        self._slots = [Slot(), Slot()]
        self._finisher = ThreadPoolExecutor(1, "disttrain-stage")
        self._world: World | None = None
        self._session: Session | None = None
        self._plan: _Plan | None = None
        self._number = 0
        self._under_way: list[PendingSave] = []
        self._untold: list[PendingSave] = []

    @property
    def writer_pid(self) -> int | None:
        """The process that writes, once there is one."""
        return None if self._session is None else self._session.writer_pid

    def save(
        self,
        state: dict[str, Any],
        path: Path,
        optimizers: Iterable[Optimizer] = (),
        *,
        claim: Claim | None = None,
        keep: int | None = None,
        consensus: Consensus | None = None,
        overwrites: bool = False,
        is_marked: bool = False,
    ) -> PendingSave:
        """See `async_save`; `claim`, `keep`: of a Checkpointer, of whose saves it is one; `overwrites`, `is_marked`:
        see `Target`. The `consensus`, by default of all ranks, is of the same ranks each time."""

        def target_of(save_id: str) -> Target:
            where = path.absolute() if isinstance(self._storage, LocalStorage) else path
            return Target(where, save_id, None if claim is None else claim.name, overwrites, is_marked)

        with uncollected():
            return self._save(state, target_of, optimizers, claim, keep, consensus or Consensus("async_save"))

    def _save(
        self,
        state: dict[str, Any],
        target_of: Callable[[str], Target],
        optimizers: Iterable[Optimizer],
        claim: Claim | None,
        keep: int | None,
        consensus: Consensus,
    ) -> PendingSave:
        if self._session is not None and self._world is not consensus.world:
            self.close()
        self._world = consensus.world
        pending = PendingSave(target_of("").path, self._number)
        self._number += 1
        described = _Described(consensus, state)
        turn = self._turn(pending.number, described)
        if turn.failure is not None:
            self._give_up(turn.failure)
        if turn.skips:
            pending.drop()
            return pending
        if turn.drops is not None:
            self._drop(turn.drops)
        if turn.plans:
            self._make_plan(consensus, described, claim)
        session, plan = self._session, self._plan
        assert session is not None
        assert plan is not None
        slot = self._taken(pending)
        session.add(pending)
        try:
            if described.digest != plan.local_digest:
                raise described.error or CheckpointError("async_save", _CHANGED, _PLAN_ANEW)
            target = target_of(session.save_id(pending.number))
            self._stage(session, plan, pending, slot, target, keep, described, list(optimizers))
        except Exception as error:  # noqa: BLE001  all ranks must hear of it, and this one's next call raises it
            self._finisher.submit(session.refuse, pending.number, as_ours(error))
        untold, self._untold = self._untold, []
        _warn_of(untold, consensus.rank)
        return pending

    def finish(self) -> None:
        """Wait for all saves that are under way; the next one is planned anew."""
        for pending in self._under_way:
            pending.wait()
        self._plan = None

    def close(self) -> None:
        """Finish all saves and let go of the writer. Raises CheckpointError for the first one that has failed and was
        not told yet. Idempotent."""
        self.finish()
        failures, ended = self._failures(), list(self._under_way)
        rank = 0 if self._session is None else self._session.rank
        self._reset(joins=True)
        _warn_of([*self._untold, *ended], rank)
        self._untold.clear()
        if failures:
            raise _combined(failures)

    def let_go(self) -> None:
        """Take no more saves; what is under way goes on."""
        session = self._session
        if session is not None:
            self._finisher.submit(session.end)
        self._finisher.shutdown(wait=False)

    def _turn(self, number: int, described: _Described) -> Turn:
        if self._session is None:
            return Turn(plans=True)
        ended = [save for save in self._under_way if save.done() and save.failure() is None]
        self._under_way = [save for save in self._under_way if save not in ended]
        self._untold += ended
        failures, is_busy = self._failures(), not any(slot.is_free for slot in self._slots)
        if failures:
            turn = Turn(
                failure=[f"the save to {failures[0][0].path} failed: {failures[0][1].problem}", failures[0][1].remedy]
            )
        elif is_busy and self._when_busy == "skip":
            turn = Turn(skips=True)
        else:
            newest = max(save.number for save in self._under_way) if is_busy else None
            drops = newest if self._when_busy == "newest" else None
            plan = self._plan
            is_old = plan is None or described.digest != plan.local_digest or plan.has_missed(self._untold)
            turn = Turn(drops=drops, plans=is_old)
        return self._session.agreed(number, turn)

    def _failures(self) -> list[tuple[PendingSave, CheckpointError]]:
        return [(save, error) for save in self._under_way if (error := save.failure()) is not None]

    def _give_up(self, failure: Sequence[str]) -> None:
        """Raise, on all ranks, for a save that has failed; the next save starts anew."""
        self.finish()
        rank = None if self._world is None else self._world.rank
        error = CheckpointError("async_save", *failure, rank=rank)
        for pending, other in self._failures()[1:]:
            error.add_note(f"The save to {pending.path} failed too: {other.problem}")
        self._reset(joins=False)
        raise error

    def _reset(self, *, joins: bool) -> None:
        session, self._session, self._plan = self._session, None, None
        self._under_way.clear()
        if session is not None:
            self._finisher.submit(session.end).result()
            if joins:
                session.join()

    def _drop(self, number: int) -> None:
        """Give up a save that has not begun, if that is still so."""
        assert self._session is not None
        dropped = next((save for save in self._under_way if save.number == number), None)
        if self._session.gives_up(number) and dropped is not None:
            dropped.staged.result()  # its memory is taken next
            dropped.drop()

    def _make_plan(self, consensus: Consensus, described: _Described, claim: Claim | None) -> None:
        """Plan together with all ranks. Raises CheckpointError, on all of them."""

        def work() -> list[Any]:
            if described.error is not None:
                raise described.error
            if not isinstance(self._storage, Portable):
                kind = type(self._storage).__name__
                raise CheckpointError("async_save", f"a {kind} has no recipe.", "Use `save`, or give it one.")
            self._storage.recipe()
            if consensus.party is not None:
                store_to_plain(consensus.party.store)
            return [described.digest, findings(described.tree), digest_of_all(described.digests.read())]

        def decide(ballots: list[list[Any]]) -> list[Any]:
            digests, findings_of_all, of_copies = zip(*ballots, strict=True)
            warn_of_no_tensor(findings_of_all)
            if claim is not None:
                claim.ensure()
            are_alike, copies_are_alike = (len(set(column)) == 1 for column in (digests, of_copies))
            return [uuid4().hex, are_alike, copies_are_alike, xxhash.xxh3_128_digest(b"".join(digests))]

        token, are_alike, copies_are_alike, digest = consensus.agree(work, decide)
        outline, copies = described.outline, described.digests.read()
        outlines: list[Outline] = [outline] * consensus.size
        differing: list[str] = []
        if not are_alike:
            outlines, differing = all_outlines(consensus, outline, {}, copies)
        elif not copies_are_alike:
            differing = consensus.agree(lambda: [{}, copies], lambda rows: look_at(consensus, rows))
        plans = plan_save(outlines, differing)
        contents = contents_of(outlines, plans) if consensus.rank == 0 else None
        part = plans[consensus.rank]
        shared = shared_names(outlines, consensus.rank, lambda outline: outline.compared)
        of_copies = shared_names(
            outlines, consensus.rank, lambda outline: [name for name in outline.plain_tensors if name not in differing]
        )
        self._plan = _Plan(described.digest, digest, part, contents, shared, of_copies, differing)
        if self._session is None:
            self._session = Session(consensus.party, token, self._memory)

    def _taken(self, pending: PendingSave) -> Slot:
        """A slot for this save, as soon as there is one."""
        while not any(slot.is_free for slot in self._slots):
            busy = [slot.pending.committed for slot in self._slots if slot.pending is not None]
            wait(busy, return_when=FIRST_COMPLETED)
        slot = next(slot for slot in self._slots if slot.is_free)
        slot.pending = pending
        self._under_way.append(pending)
        return slot

    def _stage(
        self,
        session: Session,
        plan: _Plan,
        pending: PendingSave,
        slot: Slot,
        target: Target,
        keep: int | None,
        described: _Described,
        optimizers: Sequence[Optimizer],
    ) -> None:
        tree = described.tree
        items = in_file_order(items_of(tree, plan.part))
        image = image_of(items, metadata_of(target.save_id)) if items else None
        assert isinstance(self._storage, Portable)
        recipe, number = self._storage.recipe(), self._slots.index(slot)
        shared = packed_groups(tree, plan.shared)
        job = Job(pending.number, target, keep, plan.digest, number, image, plan.contents, recipe, shared)
        digests = described.digests
        submission = Submission(self._stager, session, pending, slot, items, image, job, plan.copies, digests)
        if image is not None:
            pending.total_bytes = image.num_bytes
            submission.begin(optimizers)
        self._finisher.submit(submission.finish)


class _Described:
    """A state taken apart, or the error that this ended with."""

    def __init__(self, consensus: Consensus, state: dict[str, Any]) -> None:
        self.tree, self.outline, self.digest = Tree(consensus.operation), Outline(), b""
        self.error: Exception | None = None
        try:
            self.tree = take_apart(consensus.operation, state)
            self.outline = self.tree.outline()
            self.digest = digest_of(self.outline)
        except Exception as error:  # noqa: BLE001  raised where all ranks are together
            self.error = error
        self._has_others = consensus.size > 1

    @cached_property
    def digests(self) -> Digests:
        """Digests of plain tensors that other ranks may have, as they are when this is first called."""
        return Digests(self.tree.taken_as_alike(self.outline) if self._has_others else {})


def _combined(failures: Sequence[tuple[PendingSave, CheckpointError]]) -> CheckpointError:
    """One error for all saves that have failed."""
    (first, error), *others = failures
    combined = CheckpointError(
        "async_save", f"the save to {first.path} failed: {error.problem}", error.remedy, rank=error.rank
    )
    for pending, other in others:
        combined.add_note(f"The save to {pending.path} failed too: {other.problem}")
    return combined


def _warn_of(ended: Sequence[PendingSave], rank: int) -> None:
    for save in ended:
        if rank == 0:
            warn_of_copies(save.differing, are_mixed=True)
        if save.memory_problem:
            problem = f"{save.path} is saved, but not with all its copies in memory: {save.memory_problem}"
            warnings.warn(problem, RuntimeWarning, stacklevel=2)


_CHANGED = "what there is to save has changed since the last save, and not so on the rank that came first."
_PLAN_ANEW = "Save once more: the next save makes a new plan."
