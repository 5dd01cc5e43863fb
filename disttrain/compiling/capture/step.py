"""capture_step: a training step that becomes one launch after a few calls."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from disttrain.compiling.capture.comparing import play_and_compare
from disttrain.compiling.capture.forms import OPERATION, Form, form_of
from disttrain.compiling.capture.graph import StepGraph
from disttrain.compiling.capture.host import HostState
from disttrain.compiling.capture.subjects import Subjects, keepers_of, roots_of
from disttrain.errors import CompileError, ShapeError
from disttrain.process_group.current import current_world, has_world
from disttrain.process_group.watching.recorded_alike import Agreement, last_used
from disttrain.process_group.world import World

_log = logging.getLogger(__name__)

_DRAWN: Final = (
    f"{OPERATION}: random numbers were drawn on the host while the step was recorded. If the step has drawn them, each "
    "replay takes the same ones: draw on the GPU, or give them as tensors."
)

MAX_FORMS: Final = 256
"""Forms of arguments, and states of modules, of which calls are counted."""


def capture_step(
    step: Callable[..., Any],
    *,
    modules: Iterable[nn.Module] = (),
    optimizers: Iterable[Optimizer] = (),
    num_warmups: int = 3,
    max_graphs: int = 8,
    compare_every: int = 0,
) -> CapturedStep:
    """Makes a training step one launch: `step` runs as it is at first, is then recorded as a CUDA graph, and replayed.

    `step` is a function of tensors on the GPU with all that is repeated in it: forward, loss, backward, clipping,
    optimizer, zero_grad. Each replay copies the arguments into the recording's own memory; results are copies. Rates of
    `disttrain.kernels`' optimizers are read anew at each replay, so that schedulers work, outside of `step`; of torch's
    optimizers take those with `capturable=True` and a tensor as `lr`. Arguments of another form (shapes, dtypes, plain
    values) have a recording of their own. Where modes, hooks, parameters or an optimizer's state have changed, the step
    is recorded anew.

    Without a GPU the step runs as it is, and says so once.

    Args: modules, optimizers  what `step` works on, besides those that it refers to by itself.
          num_warmups  calls of each form that run as they are, before it is recorded.
          max_graphs     recordings that are kept; what would need more runs as it is, and says so once.
          compare_every  for debugging: each so many replays the step runs as it is too, from the same state, and must
                         come to the same. Takes time, and memory for copies of parameters and states.
    Raises: CompileError where a part of the step can't be recorded, with its line, or a comparison fails; ShapeError,
            ArgumentError for arguments that a recording can't read.
    """
    if num_warmups < 1 or max_graphs < 1 or compare_every < 0:
        problem = f"num_warmups is {num_warmups}, max_graphs {max_graphs}, compare_every {compare_every}."
        raise ShapeError(
            OPERATION, problem, "Give 1 or more: kernels are compiled, and states made, by a call as it is."
        )
    if not callable(step):
        raise ShapeError(OPERATION, f"the step is of type {type(step).__name__}.", "Give a function.")
    return CapturedStep(step, tuple(modules), tuple(optimizers), num_warmups, max_graphs, compare_every)


class CapturedStep:
    """The result of `capture_step`: is called as the step is."""

    def __init__(
        self,
        step: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        num_warmups: int,
        max_graphs: int,
        compare_every: int,
    ) -> None:
        self.step = step
        """The step as it is."""
        self._roots = (*modules, *optimizers)
        self._subjects = Subjects(())
        self._num_warmups, self._max_graphs = num_warmups, max_graphs
        self._compare_every, self._num_replays = compare_every, 0
        self._num_calls: dict[Any, int] = {}
        """By form and the subjects' state."""
        self._drops_grads: dict[Form, bool] = {}
        self._graphs: dict[Any, StepGraph] = {}
        self._used_groups: frozenset[str] = frozenset()
        """By name, those of the last call as it was."""
        self._pool: Any = None
        self._said: set[str] = set()

    @property
    def num_graphs(self) -> int:
        """Recordings that there are."""
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return self._run_as_it_is(args, kwargs, "there is no GPU.")
        if torch.cuda.is_current_stream_capturing():
            problem = "it is called while a graph is being recorded, which can't hold another."
            raise CompileError(OPERATION, problem, "Call its `.step` there.")
        form, tensors = form_of(args, kwargs)
        subjects = self._find_subjects()
        state = subjects.state()
        # Of a new state, kernels are compiled, and other memory is made.
        if self._num_calls.get((form, state), 0) < self._num_warmups:
            return self._warm_up(form, state, subjects, args, kwargs)
        grads = subjects.grads()
        if self._drops_grads.get(form):
            for parameter, grad in zip(subjects.parameters, grads, strict=True):
                if grad is not None:
                    parameter.grad = None
            grads = [None] * len(grads)
        key = form, state, tuple(map(id, grads))
        graph = self._graphs.get(key)
        if graph is None:
            return self._record(form, state, tensors, subjects, args, kwargs)
        if reason := graph.obstacle():
            _log.info("%s: recorded anew, since %s", OPERATION, reason)
            del self._graphs[key]
            return self._record(form, state, tensors, subjects, args, kwargs)
        self._num_replays += 1
        if self._compare_every and self._num_replays % self._compare_every == 0:
            return play_and_compare(graph, self.step, tensors, args, kwargs)
        return graph.play(tensors)

    def _find_subjects(self) -> Subjects:
        """Those of now: what the step refers to may be another model than at its last call, or have other layers."""
        roots = roots_of(self.step, self._roots)
        if not self._subjects.holds(roots):
            self._subjects = Subjects(roots)
        return self._subjects

    def _warm_up(self, form: Form, state: Any, subjects: Subjects, args: Any, kwargs: Any) -> Any:
        if len(self._num_calls) >= MAX_FORMS:
            self._num_calls.clear()
        self._num_calls[form, state] = self._num_calls.get((form, state), 0) + 1
        before = subjects.grads()
        world = _world()
        numbers = {} if world is None else {group.group_name: group.sequence for group in world.groups}
        results = self.step(*args, **kwargs)
        self._used_groups = last_used(_world(), numbers)
        if any(grad is not None for grad in before):
            # What is summed up in place stays what it is.
            pairs = zip(before, subjects.grads(), strict=False)
            self._drops_grads[form] = not any(old is not None and new is old for old, new in pairs)
        return results

    def _record(
        self, form: Form, state: Any, tensors: Sequence[torch.Tensor], subjects: Subjects, args: Any, kwargs: Any
    ) -> Any:
        self._graphs = {key: graph for key, graph in self._graphs.items() if not graph.is_released}
        if len(self._graphs) >= self._max_graphs:
            return self._run_as_it_is(args, kwargs, f"there are {self._max_graphs} recordings already: see max_graphs.")
        agreement = Agreement(_world(), self._used_groups)
        graph = host = None
        try:
            _check(subjects)
            host = HostState(subjects, keepers_of(self.step))
            if not self._graphs or self._pool is None:
                # That of graphs which are gone is gone with them.
                self._pool = torch.cuda.graph_pool_handle()
            graph = StepGraph(self.step, form, tensors, subjects, self._pool)
            _check(subjects)
            if reason := host.changes():
                raise CompileError(OPERATION, reason, "Do that after the call, or call the step as it is.")
            if host.has_drawn():
                # Before the ranks agree: where warnings are errors, no other may launch.
                warnings.warn(_DRAWN, stacklevel=3)
            agreement.agree(graph.recorded())
        except Exception as error:
            # torch takes it to be recorded into for ever.
            self._pool = None
            agreement.refuse(error)
            if graph is not None:
                graph.release(f"it was not agreed on: {error}")
            if host is not None:
                host.restore()
                subjects.forget_recording()
            raise
        # Kept with the gradients that it was recorded with, so that their ids are nobody else's.
        self._graphs[form, state, tuple(map(id, graph.grads_before))] = graph
        return graph.play_first(tensors)

    def _run_as_it_is(self, args: Any, kwargs: Any, reason: str) -> Any:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"{OPERATION}: the step runs as it is, since {reason}", stacklevel=3)
        return self.step(*args, **kwargs)


def _world() -> World | None:
    return current_world(OPERATION) if has_world() else None


def _check(subjects: Subjects) -> None:
    if reason := subjects.obstacle():
        raise CompileError(OPERATION, reason, "Have the whole of it within the step.")
