"""Checkpointer: the saves of one training run in one directory, by step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from torch.optim import Optimizer

from disttrain.arguments import arguments_of
from disttrain.checkpoint.async_saving.pending import PendingSave
from disttrain.checkpoint.async_saving.saver import AsyncSaver, WhenBusy
from disttrain.checkpoint.loading.fits import LoadReport, Misfit, Rename, Rules
from disttrain.checkpoint.loading.load import load_folder
from disttrain.checkpoint.memory.loading import load_replica, replicated_saves
from disttrain.checkpoint.memory.peer_memory import PeerMemory
from disttrain.checkpoint.saving.commit import retire_old
from disttrain.checkpoint.saving.consensus import Consensus
from disttrain.checkpoint.saving.save import save_folder
from disttrain.checkpoint.storage.base import Storage, locate
from disttrain.checkpoint.storage.claims import Claim
from disttrain.checkpoint.storage.folders import steps
from disttrain.checkpoint.storage.removal import Removal
from disttrain.errors import CheckpointError


class Checkpointer:
    """Saves in `directory`, as folders `step-00000042`.

    Args: directory  made by the first save;  keep  how many saves stay, the newest ones; None: all of them;
          every  how often `is_due` says so;  when_busy  what `async_save` does while two saves are under way;
          peer_memory  keep the newest saves in the memory of nodes, too: `load` after a restart takes them from there.
    Close it after the last `async_save`, or use it as a context manager. One job at a time may save to a directory: see
    `storage/claims.py`. `report` is that of the last load.
    All methods but `is_due` are collective: every rank of the default world, or one process without a world.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int | None = 2,
        *,
        every: int = 1,
        when_busy: WhenBusy = "wait",
        storage: Storage | None = None,
        peer_memory: PeerMemory | None = None,
    ) -> None:
        with arguments_of("Checkpointer", remedy="Give numbers of saves and of steps."):
            is_kept, is_every = keep is None or int(keep) >= 1, int(every) >= 1
        if not is_kept:
            raise CheckpointError("Checkpointer", f"keep is {keep}.", "Keep at least 1 save; None keeps all.")
        if not is_every:
            raise CheckpointError(
                "Checkpointer", f"every is {every}.", "Save every step (1), every second one (2), ..."
            )
        if when_busy not in get_args(WhenBusy):
            raise CheckpointError("Checkpointer", f"when_busy is {when_busy!r}.", f"It is one of {get_args(WhenBusy)}.")
        self._storage, self.directory = locate(directory, storage)
        self.keep = keep
        self.every = every
        self.when_busy = when_busy
        self._memory = None if peer_memory is None else peer_memory.of(self.directory)
        self._claim = Claim(self._storage, self.directory)
        self._removal = Removal(self._storage)
        self._saver: AsyncSaver | None = None
        self.report = LoadReport()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # An error of the block takes precedence; often it is about the same save.
            if not (isinstance(error, CheckpointError) and error.problem in failure.problem):
                error.add_note(str(failure))

    def is_due(self, step: int) -> bool:
        """True if `step` is one of those to be saved: each `every`-th, but not 0."""
        return step > 0 and step % self.every == 0

    def async_save(
        self, step: int, state: dict[str, Any], optimizers: Optimizer | Iterable[Optimizer] = ()
    ) -> PendingSave:
        """`save`, but return as soon as the values are safe from what comes next. See the function `async_save`.

        Two saves may be under way. A third one waits for the first ("wait"), is left out ("skip"), or takes the place
        of the second, unless that is being written already ("newest"): all ranks do the same.
        Raises CheckpointError, on every rank: for the last save, if it has failed. The save after that starts anew.
        """
        self._check_step("Checkpointer.async_save", step)
        if self._saver is None:
            self._saver = AsyncSaver(self._storage, self.when_busy, self._memory)
        listed = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        pending = self._saver.save(state, self._folder(step), listed, claim=self._claim, keep=self.keep)
        self._claim.outlive()
        return pending

    @property
    def writer_pid(self) -> int | None:
        """The process that writes this rank's saves; None before the first `async_save`."""
        return None if self._saver is None else self._saver.writer_pid

    def close(self) -> None:
        """Finish all saves. Raises CheckpointError for one that has failed and was not told yet. Idempotent."""
        saver, self._saver = self._saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            self._removal.wait()
            self._claim.close()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a state as that of `step`, then remove the oldest saves. See `save` for what a state is.

        Raises CheckpointError, on every rank: when it could not be saved, when there is a save of `step`, or when
        another job has the directory, with all saves as they were; when an old save could not be removed, with `step`
        saved.
        """
        self._check_step("Checkpointer.save", step)
        if self._memory is not None:
            # The processes that write saves are those that keep them in memory.
            self._save_and_wait(step, state)
            return
        consensus = Consensus("Checkpointer.save")
        self._removal.wait()
        save_folder(consensus, state, self._folder(step), self._storage, self._claim)
        dying: list[Path] = []
        consensus.agree(
            lambda: None, lambda _: dying.extend(retire_old(self._storage, self.directory, step, self.keep))
        )
        self._removal.begin(dying)

    def latest(self) -> int | None:
        """The newest step with a whole save; None where there is none."""
        consensus = Consensus("Checkpointer.latest")
        with replicated_saves(consensus, self._memory) as replicas:
            return max((*self._agreed_steps(consensus), *(save.step for save in replicas)), default=None)

    def load(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        allow: Iterable[Misfit] = (),
        rename: Rename | None = None,
        convert: str | Iterable[str] = (),
    ) -> int:
        """Load the save of `step` (default: the latest) into `state`, in place.

        From the memory of nodes where it is whole there, else from `directory`; a copy that turns out to be damaged is
        told as a warning.
        Args, errors: those of the function `load`; its report is in `report`. Returns: the step.
        """
        rules = Rules.of(allow, convert, rename)
        consensus = Consensus("Checkpointer.load")
        with replicated_saves(consensus, self._memory) as replicas:
            steps = self._agreed_steps(consensus)
            for save in replicas:
                if save.step < max(steps, default=0) if step is None else save.step != step:
                    continue
                report = load_replica(consensus, state, save, rules)
                if report is not None:
                    self.report = report
                    return save.step
        chosen: int = consensus.agree(lambda: None, lambda _: self._wanted(steps, step))
        self.report = load_folder(consensus, state, self._folder(chosen), self._storage, rules)
        return chosen

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    @staticmethod
    def _check_step(operation: str, step: int) -> None:
        if step < 0:
            raise CheckpointError(operation, f"step is {step}.", "Count steps from 0.")

    def _save_and_wait(self, step: int, state: dict[str, Any]) -> None:
        if self._saver is not None:
            # This save must not be skipped as one too many. And since all ranks wait, they may plan together.
            self._saver.finish()
        try:
            self.async_save(step, state).result()
        except CheckpointError:
            # All ranks raise this error now, and must not raise it again.
            with suppress(CheckpointError):
                self.close()
            raise

    def _agreed_steps(self, consensus: Consensus) -> list[int]:
        """The steps that were saved whole in `directory`, ascending."""
        result: list[int] = consensus.agree(lambda: None, lambda _: list(steps(self._storage, self.directory)))
        return result

    def _wanted(self, steps: list[int], step: int | None) -> int:
        if not steps:
            raise CheckpointError("load", f"there is no save in {self.directory}.", "Save first, or look elsewhere.")
        if step is not None and step not in steps:
            raise CheckpointError("load", f"{self.directory} has no save of step {step}.", f"It has steps {steps}.")
        return steps[-1] if step is None else step
