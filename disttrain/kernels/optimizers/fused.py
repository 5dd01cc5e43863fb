"""AdamW, Lion and SGD whose step is one launch over all parameters, with gradients scaled and clipped on the way.

A step is bound by memory: with everything in fp32, AdamW reads 16 bytes per element and writes 12. Scaling, clipping
and rounding to a copy add no pass over memory here, and states in bf16 save 8 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.optim import Optimizer

from disttrain.dtensor import DTensor
from disttrain.dtensor.views.view_copy import count_writes
from disttrain.errors import BackendError, ShapeError
from disttrain.kernels._torch import version_of
from disttrain.kernels.choice import choose, wide_dtype
from disttrain.kernels.optimizers import reference as optimizer_reference
from disttrain.kernels.optimizers.counts import count_steps
from disttrain.kernels.optimizers.pieces import Pieces, those_with_grads
from disttrain.kernels.optimizers.recorded import Launch, RecordedStep
from disttrain.kernels.optimizers.rules import ROW, Piece, Rule
from disttrain.kernels.optimizers.taken_over import LastPieces
from disttrain.kernels.optimizers.total_norm import total_norm
from disttrain.kernels.recording import Recording, current_recording

_HALVES: Final = (torch.bfloat16, torch.float16)
_STATE_DTYPES: Final = (None, torch.float32, torch.float64, torch.bfloat16)

_UNKNOWN_OPTIONS: Final = ("amsgrad", "maximize", "dampening")


class Copies(Protocol):
    """Somebody who wants parameters once more in another dtype."""

    def begin(self) -> Mapping[int, torch.Tensor]:
        """A step begins: by a parameter's id, memory of its own part's shape that is to be written."""

    def end(self, written: Iterable[torch.Tensor]) -> None:
        """The step is over, and has written these parameters and their copies."""

    def forget(self) -> None:
        """Have the copies that there are not used any more."""


class FusedOptimizer(Optimizer):
    """The base of AdamW, Lion and SGD.

    Args: state_dtype  of the averages; None: fp32 (fp64 of fp64 parameters). bf16 is rounded at random.
          keep_master  half-precision parameters have a copy in fp32 in the optimizer's state, which is what is updated;
                       the parameters are written with it. Without one, bf16 parameters are rounded at random.
          max_norm     gradients are scaled down together so that their norm over all parameters, of all ranks, is at
                       most this; None: they stay.
    """

    state_names: tuple[str, ...] = ()

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        state_dtype: torch.dtype | None,
        keep_master: bool,
        max_norm: float | None,
    ) -> None:
        if state_dtype not in _STATE_DTYPES:
            raise ShapeError(type(self).__name__, f"state_dtype is {state_dtype}.", "Give float32 or bfloat16.")
        if defaults["lr"] < 0 or defaults["weight_decay"] < 0 or (max_norm is not None and max_norm <= 0):
            problem = f"lr is {defaults['lr']}, weight_decay {defaults['weight_decay']}, max_norm {max_norm}."
            raise ShapeError(type(self).__name__, problem, "Give numbers that are not negative.")
        self.max_norm = max_norm
        self._copies: list[Copies] = []
        self._written: dict[torch.Tensor, Any] = {}
        """The version (`version_of`) of parameters with masters when they were written here."""
        self._last_pieces: dict[int, LastPieces] = {}
        """Of each group, by its first parameter's number."""
        super().__init__(params, {**defaults, "state_dtype": state_dtype, "keep_master": keep_master})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: torch.Tensor | None = None) -> Any:
        """Update all parameters that have a gradient; gradients stay as they are.

        Args: grad_scale  a number on the parameters' device, such as 1 / loss scale, by which gradients are multiplied
                          before all else.
        Raises: BackendError while a CUDA graph is captured by others than `capture_step`, before anything was changed.
        Collective with max_norm and DTensors: all ranks of their meshes.
        """
        recording = self._recording()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grads = [those_with_grads(group["params"]) for group in self.param_groups]
        scale = self._scale(grad_scale, with_grads)
        number = 0
        copy_of: dict[int, torch.Tensor] = {}
        # A graph would read the copies of the step before it where they lay when it was recorded.
        for copies in self._copies if recording is None else ():
            copy_of |= copies.begin()
        updated: list[torch.Tensor] = []
        launches: list[Launch] = []
        for group, (parameters, grads) in zip(self.param_groups, with_grads, strict=True):
            self._check_options(group)
            if recording is not None:
                for parameter in parameters:
                    self._check_is_complete(parameter, group)
            pieces, kept = self._pieces(group, parameters, grads, number, copy_of)
            number += len(group["params"])
            for launch, some in self._launches(group, parameters, pieces, kept, recording):
                launches.append(launch)
                updated += launch.parameters
                if some:
                    _update(type(self).__name__, some, launch, scale)
            # Neither a kernel's writes nor those to a DTensor's part are seen by autograd, or by views across a cut.
            count_writes(kept.written)
            self.trust_masters(kept.with_masters)
        if recording is not None:
            recording.add(RecordedStep(self, launches))
        for copies in self._copies if recording is None else ():
            copies.end(updated)
        return loss

    def _launches(
        self,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        kept: LastPieces,
        recording: Recording | None,
    ) -> list[tuple[Launch, list[Piece]]]:
        """The group's launches, whose steps are counted hereby."""
        steps = count_steps(kept.states)
        places_of: defaultdict[Any, list[int]] = defaultdict(list)
        for place, (piece, step) in enumerate(zip(pieces, steps, strict=True)):
            places_of[step if kept.are_of_one_kind else (step, piece.parameter.device, piece.kind)].append(place)
        launches = []
        for places in places_of.values():
            numbers = None if recording is None else recording.take(ROW)
            launch = Launch(group, [parameters[place] for place in places], self.rule(group, steps[places[0]]), numbers)
            launches.append((launch, [pieces[place] for place in places if pieces[place].parameter.numel()]))
        return launches

    def _pieces(
        self,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        number: int,
        copy_of: Mapping[int, torch.Tensor],
    ) -> tuple[list[Piece], LastPieces]:
        """The pieces of these parameters of the group, with these gradients; their states are completed. `number` is
        the group's first parameter's among those of all groups."""
        names, last = self._names(group), self._last_pieces.get(number)
        facts = names, group["state_dtype"], group["keep_master"]
        if last is not None and last.are_still(facts, self.state, parameters):
            for parameter in last.with_masters:
                self.begin_step(parameter, group)
            if (renewed := last.pieces(grads, copy_of)) is not None:
                return renewed, last
        taken, pieces, index_of = Pieces(), [], {id(each): index for index, each in enumerate(group["params"], number)}
        for parameter in parameters:
            state = self.begin_step(parameter, group)
            pieces.append(taken.of(parameter, state, names, index_of[id(parameter)], copy_of.get(id(parameter))))
        last = self._last_pieces[number] = LastPieces(facts, self.state, parameters, pieces)
        return pieces, last

    def trust_masters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that these parameters are copies of their masters now."""
        for parameter in parameters:
            self._written[parameter] = version_of(parameter, _local(parameter))

    def write_copies(self, copies: Copies) -> None:
        """Write parameters once more in each step, where `copies` say."""
        self._copies.append(copies)

    def forget_copies(self) -> None:
        """Have the copies of the last step not used: they lie elsewhere after each."""
        for copies in self._copies:
            copies.forget()

    def distrust_masters(self) -> None:
        """Have masters compared with their parameters at the next step: a recording that failed has brought none of
        them up to date."""
        self._written.clear()

    def _recording(self) -> Recording | None:
        """The recording that this step is part of. Raises where others capture a graph: what the host puts into a
        launch (step count, rates, seeds) would be the same in all replays."""
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return None
        recording = current_recording()
        if recording is None:
            problem = "a CUDA graph is being captured, and each replay would repeat this step's count, rates and seeds."
            remedy = "Take disttrain.compiling.capture_step, or step outside of the graph."
            raise BackendError(f"{type(self).__name__}.step", problem, remedy)
        return recording

    def _check_is_complete(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Refuses a step that would make state: each replay of the recorded one would make it again."""
        state = self.state.get(parameter, {})
        if any(state.get(name) is None for name in ("step", *self._names(group))):
            problem = f"a parameter of shape {tuple(parameter.shape)} has no state yet, which a graph would make anew."
            raise BackendError(f"{type(self).__name__}.step", problem, "Take a step as it is before: see num_warmups.")

    def _check_options(self, group: dict[str, Any]) -> None:
        """A loaded state may bring options of torch's optimizers that there are not here."""
        for name in _UNKNOWN_OPTIONS:
            if group.get(name):
                problem = f"a group has {name}={group[name]}, from the state that was loaded."
                raise ShapeError(type(self).__name__, problem, "Go on with torch's optimizer, or take it out.")

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.state_names

    def rule(self, group: dict[str, Any], step: int) -> Rule:
        raise NotImplementedError

    def _scale(
        self, grad_scale: torch.Tensor | None, with_grads: Sequence[tuple[Any, Sequence[torch.Tensor]]]
    ) -> torch.Tensor | None:
        if self.max_norm is not None:
            self._check_all_are_counted([p for group in self.param_groups for p in group["params"]])
        grads = [grad for _, grads in with_grads for grad in grads]
        if self.max_norm is None or not grads:
            return None if grad_scale is None else grad_scale.float()
        norm = total_norm(grads)
        if grad_scale is not None:
            norm = norm * grad_scale.abs()
        clipped = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return (clipped if grad_scale is None else clipped * grad_scale).float()

    def _check_all_are_counted(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise for parameters in whose place, or beside which, other ranks have others, as experts of a ModuleList:
        each rank would clip by a norm of its own. Ranks without experts raise, too."""
        axes = (getattr(p, "divided_along", None) or getattr(p, "beside_divided", None) for p in parameters)
        divided = next((axis for axis in axes if axis is not None), None)
        if divided is not None and divided.size() > 1:
            raise ShapeError(
                type(self).__name__,
                f"max_norm={self.max_norm} is given for experts in a ModuleList, of which each rank has its own alone.",
                "Leave max_norm out, and call disttrain.experts.clip_grad_norm_(model, max_norm) before each step.",
            )

    def begin_step(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, completed: all at first, later what another optimizer's state has not, or new
        options ask for."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            # On the CPU, where it can be read without waiting for the device.
            state["step"] = torch.zeros((), dtype=torch.float32)
        for name in self._names(group):
            if state.get(name) is None:
                dtype = group["state_dtype"] or wide_dtype(parameter.dtype)
                state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
        if group["keep_master"] and parameter.dtype in _HALVES and "master" not in state:
            state["master"] = parameter.detach().float()
        if "master" in state and self._written.get(parameter) != version_of(parameter, _local(parameter)):
            # Others have written to the parameter, or nobody knows: where it is no copy of the master it is right.
            master, current = _local(state["master"]), _local(parameter)
            master.copy_(torch.where(master.to(current.dtype) == current, master, current.float()))
        return state

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy."""
        return {**super().__getstate__(), "max_norm": self.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what comes of another optimizer, whose groups have other options."""
        super().__setstate__(state)
        self._copies = vars(self).get("_copies", [])
        self._written, self._last_pieces = {}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch's does, but states keep the dtypes that they were saved in."""
        super().load_state_dict(state_dict)
        saved_keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved_keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name == "step":
                    self.state[parameter][name] = torch.as_tensor(value, dtype=torch.float32).to("cpu", copy=True)
                elif isinstance(value, torch.Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


class AdamW(FusedOptimizer):
    """torch.optim.AdamW in one launch; see `FusedOptimizer` for what it has besides."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | None = None,
        keep_master: bool = True,
        max_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, state_dtype, keep_master, max_norm)

    def rule(self, group: dict[str, Any], step: int) -> Rule:
        beta1, beta2 = group["betas"]
        corrections = 1 - beta1**step, (1 - beta2**step) ** 0.5
        return Rule(
            "adamw", float(group["lr"]), group["weight_decay"], beta1, beta2, group["eps"], *corrections, step=step
        )


class Lion(FusedOptimizer):
    """Chen et al., arXiv 2302.06675: steps of one size by the sign of an average of gradients, with half the state."""

    state_names = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state_dtype: torch.dtype | None = None,
        keep_master: bool = True,
        max_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, state_dtype, keep_master, max_norm)

    def rule(self, group: dict[str, Any], step: int) -> Rule:
        beta1, beta2 = group["betas"]
        return Rule("lion", float(group["lr"]), group["weight_decay"], beta1, beta2, step=step)


class SGD(FusedOptimizer):
    """torch.optim.SGD in one launch, without dampening; see `FusedOptimizer` for what it has besides."""

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        state_dtype: torch.dtype | None = None,
        keep_master: bool = True,
        max_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, state_dtype, keep_master, max_norm)

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def rule(self, group: dict[str, Any], step: int) -> Rule:
        is_nesterov = bool(group["nesterov"])
        return Rule(
            "sgd", float(group["lr"]), group["weight_decay"], group["momentum"], is_nesterov=is_nesterov, step=step
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _update(operation: str, pieces: Sequence[Piece], launch: Launch, scale: torch.Tensor | None) -> None:
    first = pieces[0]
    obstacle = ""
    if not all(tensor.is_contiguous() for piece in pieces for tensor in (piece.parameter, *piece.states)):
        obstacle = "a parameter is not contiguous."
    if any(dtype is torch.float64 for dtype in first.kind):
        obstacle = "its kernels don't take torch.float64."
    implementation = choose(operation, first.parameter, obstacle, optimizer_reference, _load)
    if launch.numbers is None:
        implementation.update(pieces, launch.rule, scale)
    elif implementation is optimizer_reference:
        problem = "torch's operators compute it, into which a graph would put this step's rates."
        raise BackendError(f"{operation}.step", problem, "Step outside of what is captured, or take fp32 parameters.")
    else:
        implementation.update(pieces, launch.rule, scale, launch.numbers)


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.optimizers import triton_kernels as optimizer_triton

    return optimizer_triton
