"""One recording of a step: a CUDA graph with the memory of its inputs, and what the host does at each replay."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from disttrain.compiling._torch import count_writes, tree_flatten, tree_unflatten
from disttrain.compiling.capture.forms import OPERATION, Form, check_results, part_of, with_tensors
from disttrain.compiling.capture.restoring import restored_if_failed
from disttrain.compiling.capture.subjects import Subjects
from disttrain.errors import CompileError, DisttrainError
from disttrain.kernels.recording import Recording, recording
from disttrain.process_group import is_initialized
from disttrain.process_group.current import current_world
from disttrain.process_group.holders import hold
from disttrain.process_group.watching.replaying import listed_operations

_NUM_NUMBERS: Final = 1 << 18
"""64-bit numbers that the host may write before a replay, seven for each launch of an optimizer, and in tables that
launches read, some for each tensor: 2 MiB."""


class StepGraph:
    """A step's work on the GPU for one form of arguments.

    Args: pool  memory that the graphs of one step share, which never run at the same time.
    """

    def __init__(
        self, step: Callable[..., Any], form: Form, tensors: Sequence[torch.Tensor], subjects: Subjects, pool: Any
    ) -> None:
        self.subjects = subjects
        self._graph = torch.cuda.CUDAGraph()
        self._inputs = [_copy_of(tensor) for tensor in tensors]
        self.grads_before = subjects.grads()
        """Kept, since recordings are found by what they are."""
        args, kwargs = with_tensors(form, self._inputs)
        subjects.prepare()
        torch.cuda.synchronize()
        written = subjects.versions()
        self._released = ""
        if is_initialized():
            hold(current_world(OPERATION).groups, self)
        memory = torch.empty(_NUM_NUMBERS, dtype=torch.int64, device="cuda")
        with recording(memory) as host, listed_operations() as self._replays:
            self._results, self._structure = self._record(step, args, kwargs, pool)
        self._host: Recording = host
        pairs = zip(subjects.parameters, self.grads_before, subjects.grads(), strict=True)
        self._new_grads = [(parameter, new) for parameter, old, new in pairs if new is not old]
        self._written = [tensor for tensor, version in subjects.versions().items() if written.get(tensor) != version]

    def _record(self, step: Callable[..., Any], args: Any, kwargs: Any, pool: Any) -> tuple[list[Any], Any]:
        failure: Exception | None = None
        results = None
        try:
            # What other threads do is their own: transports look at their events all the time.
            with (
                restored_if_failed(),
                _without_warnings(),
                torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
            ):
                try:
                    self._replays.begin_graph()
                    results = step(*args, **kwargs)
                    self._replays.end_graph()
                except Exception as error:  # noqa: BLE001  what ends the recording would hide it
                    failure = error
        except RuntimeError as error:
            failure = failure or error
        if isinstance(failure, RuntimeError) and not isinstance(failure, DisttrainError | torch.OutOfMemoryError):
            problem = f"{_cause(failure)}, at {_line_of(failure)}: it has the host wait, or can't be part of a graph."
            remedy = "Take it out of the step: print, .item() and the like afterwards; or call the step as it is."
            raise CompileError(OPERATION, problem, remedy) from failure
        if failure is not None:
            raise failure
        leaves, structure = tree_flatten(results)
        check_results(leaves)
        return [None if value is None else value.detach() for value in leaves], structure

    def recorded(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Its collectives, as `Replays.recorded`."""
        return self._replays.recorded()

    def obstacle(self) -> str:
        """Why it can't be replayed any more; empty where it can."""
        reasons = (part.obstacle() for part in self._host.parts)
        return self._released or self._replays.obstacle() or next(filter(None, reasons), "")

    @property
    def is_released(self) -> bool:
        return bool(self._released)

    def release(self, reason: str) -> None:
        """Lets go of the recording, and of the communicators in it."""
        torch.cuda.synchronize()
        self._released = reason
        self._graph.reset()

    def play_first(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Have the GPU do what was recorded; the host's part was done meanwhile. Returns the step's results.

        Gradients are those that the recording has left.
        """
        self._replays.begin(is_first=True)
        self._fill(tensors)
        self._host.write_tables()
        for part in self._host.parts:
            part.before_first()
        self._graph.replay()
        self._replays.end()
        return self._end()

    def play(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The whole step; returns its results, in memory of their own. Gradients are `grads_before`."""
        self._replays.begin()
        self._fill(tensors)
        for part in self._host.parts:
            part.before_replay()
        self._graph.replay()
        self._replays.end()
        for parameter, grad in self._new_grads:
            parameter.grad = grad
        return self._end()

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for static_input, tensor in zip(self._inputs, tensors, strict=True):
                part_of(static_input).copy_(part_of(tensor), non_blocking=True)

    def _end(self) -> Any:
        # What others keep by a tensor's version must not outlive writes that torch has not seen.
        count_writes(self._written)
        # After that, since parts note what the versions are.
        for part in self._host.parts:
            part.after_replay()
        return tree_unflatten([_result(value) for value in self._results], self._structure)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad)


def _result(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone()


def _cause(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _line_of(error: BaseException) -> str:
    """The innermost line of the traceback that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if "/torch/" not in frame.filename][-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A step that launches nothing is no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield
