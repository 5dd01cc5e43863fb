"""Runs programs on ranks that are threads, and compares all that is there afterwards with plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import disttrain
from disttrain.dtensor import DTensor
from disttrain.errors import CollectiveMismatchError, CollectiveTimeoutError
from disttrain.testing import run_threads
from tests.dtensor_programs.execute import Run, leaf_maker, plain_leaf, plain_redistribute, redistribute
from tests.dtensor_programs.program import Leaf, Program, Step, leaves_of, mapped

_NUM_NOISES = 12
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 4e-2}


@dataclass
class Verdict:
    """How a program went. A fault is silent (other values), raw (an error that is not ours), apart (only some ranks
    had it), or a hang."""

    program: Program
    fault: str = ""
    text: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    """Functions that all ranks refused alike, and how."""
    is_shaky: bool = False
    """It differs, but so does plain torch when its results are changed in their last bits; or it does not with 16 more
    bits."""


@dataclass(frozen=True)
class _RankResult:
    refused: dict[int, str]
    differences: dict[str, str] = field(default_factory=dict)
    """By the names of values."""


def run_programs(programs: Sequence[Program]) -> list[Verdict]:
    """Run programs of one world's size, in one world for as long as no rank fails."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(programs):
        rest = programs[len(verdicts) :]
        ends = run_threads(rest[0].world_size, _run_rank, rest, timeout_s=120.0)
        num_done = min(len(results) for results, _ in ends)
        verdicts += [_judged(rest[place], [results[place] for results, _ in ends]) for place in range(num_done)]
        if num_done < len(rest):
            errors = [error if len(results) == num_done else None for results, error in ends]
            verdicts.append(_failed(rest[num_done], errors))
    return verdicts


def run_program(program: Program) -> Verdict:
    """Run one program in a world of its own."""
    return run_programs([program])[0]


def _run_rank(programs: Sequence[Program]) -> tuple[list[_RankResult], Exception | None]:
    """What came of each program, up to the first error."""
    meshes: dict[tuple[int, ...], Any] = {}
    results: list[_RankResult] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            mesh = meshes.get(program.mesh_shape)
            if mesh is None:
                mesh = meshes[program.mesh_shape] = disttrain.init_device_mesh("cpu", program.mesh_shape)
            try:
                results.append(_run_one(program, mesh))
            except Exception as error:  # noqa: BLE001 -- it is what this is about
                return results, error
    return results, None


def _run_one(program: Program, mesh: disttrain.DeviceMesh) -> _RankResult:
    run = Run(leaf_maker(mesh), redistribute)
    for step in program.steps:
        try:
            run.do(step)
        except Exception as error:
            error.add_note(f"v{step.number} = {step.function}(...)")
            raise
    refused = {number: _without_rank(error) for number, error in run.refused.items()}
    # All ranks read all values, also those that some find wrong.
    found = snapshot(run)
    plain = Run(plain_leaf, plain_redistribute)
    try:
        expected = snapshot(replay(plain, program.steps, refused))
    except RuntimeError:
        # Without the steps that were refused, torch refuses another.
        return _RankResult(refused)
    bound = _bound_of(program, expected)
    texts = {key: difference(value, expected.get(key), bound) for key, value in found.items()}
    return _RankResult(refused, {key: text for key, text in texts.items() if text})


def _bound_of(program: Program, values: dict[str, Any]) -> float:
    """What values may differ by at least: gradients are made of what forwards have kept, in its dtype, whatever theirs
    is, and torch rounds there in another order than ranks do."""
    has_gradients = any(step.function in ("backward", "gradient") for step in program.steps)
    dtypes = {value.dtype for value in values.values() if isinstance(value, torch.Tensor)} if has_gradients else ()
    return max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def replay(run: Run, steps: Sequence[Step], refused: Any) -> Run:
    """Run the steps that were not refused."""
    for step in steps:
        if step.number not in refused:
            run.do(step)
    return run


def snapshot(run: Run) -> dict[str, Any]:
    """All values and gradients, by name. Of DTensors the full tensors, which is collective."""
    found: dict[str, Any] = {}
    for number, result in run.values.items():
        for item, leaf in enumerate(leaves_of(result)):
            name = f"v{number}[{item}]" if isinstance(result, list | tuple) else f"v{number}"
            found[name] = read(leaf)
            if run.is_leaf(number) and leaf.is_leaf and leaf.grad is not None:
                found[f"{name}.grad"] = read(leaf.grad)
    return found


@dataclass(frozen=True)
class _Read:
    """The value of a DTensor, and what it said of itself."""

    whole: torch.Tensor
    text: str
    is_consistent: bool


def read(leaf: Any) -> Any:
    """A value to compare. Collective for a DTensor."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch.no_grad():
        try:
            value = leaf.detach()
        except RuntimeError:
            # A view from before a write of which autograd cannot say what it is.
            return None
        if not isinstance(value, DTensor):
            return value.clone()
        whole = value.full_tensor()
    spec = leaf._spec
    fits = tuple(leaf._local_tensor.shape) == spec.local_shape and tuple(leaf.shape) == spec.shape == tuple(whole.shape)
    return _Read(whole.clone(), f"{list(leaf.placements)}", fits and whole.dtype == leaf.dtype)


def difference(found: Any, expected: Any, bound: float = 0.0) -> str:
    """What is different; empty where nothing is, or no more than `bound`, or than its dtype lets it be."""
    if not isinstance(found, _Read):
        if isinstance(found, torch.Tensor):
            return f"a plain tensor of shape {tuple(found.shape)} instead of a DTensor"
        if isinstance(expected, torch.Tensor):
            is_zero = is_close(expected, torch.zeros_like(expected), bound)
            return "" if found is None and is_zero else f"{found!r} instead of a tensor"
        return "" if _is_same_plain(found, expected) else f"{found} instead of {expected}"
    if expected is None and not found.whole.any():
        return ""  # a gradient that is zero may be none, and the other way round
    if not isinstance(expected, torch.Tensor):
        return f"a tensor of shape {tuple(found.whole.shape)} instead of {expected!r}"
    whole = found.whole
    if not found.is_consistent:
        return f"its part, its shape and its whole {tuple(whole.shape)} do not fit together: {found.text}"
    if whole.shape != expected.shape or whole.dtype != expected.dtype:
        return f"{tuple(whole.shape)} {whole.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    if is_close(whole, expected, bound):
        return ""
    return f"lies as {found.text}, is {_some(whole)} instead of {_some(expected)}"


def is_close(one: torch.Tensor, other: torch.Tensor, bound: float = 0.0) -> bool:
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    bound = max(bound, _TOLERANCES.get(one.dtype, 1e-6))
    return torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True)


def _is_same_plain(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= 1e-3 * (1 + abs(expected)) or (found != found and expected != expected)
    return bool(found == expected)


def _some(tensor: torch.Tensor) -> str:
    values = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in tensor.flatten().tolist()]
    return f"{list(tensor.shape)}: {' '.join(values[:24])}{' ...' if len(values) > 24 else ''}"


def _without_rank(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(' [rank')[0]}"


def _judged(program: Program, results: Sequence[_RankResult]) -> Verdict:
    refused = results[0].refused
    if any(result.refused != refused for result in results):
        return Verdict(program, "apart", f"refused by rank: {[result.refused for result in results]}")
    functions = {step.number: step.function for step in program.steps}
    verdict = Verdict(
        program, refused={functions[number]: text for number, text in refused.items() if "was refused" not in text}
    )
    differing = {key for result in results for key in result.differences}
    if differing:
        surely = differing - shaky_values(program, refused)
        verdict.is_shaky = not surely
        texts = [
            f"rank {rank}: {key}: {text}"
            for rank, result in enumerate(results)
            for key, text in result.differences.items()
            if key in surely
        ]
        if texts:
            verdict.fault, verdict.text = "silent", "\n".join(texts)
    if verdict.fault and (wide := widened(program)) != program and not run_program(wide).fault:
        # Within a gradient no result of plain torch can be changed: what cancels out there is left with its rounding.
        return Verdict(program, refused=verdict.refused, is_shaky=True)
    return verdict


def widened(program: Program) -> Program:
    """The program with all that is bf16 in fp32."""

    def wide(value: Any) -> Any:
        if isinstance(value, Leaf):
            return replace(value, dtype=wide(value.dtype))
        return torch.float32 if value is torch.bfloat16 else value

    steps = [replace(step, args=mapped(wide, step.args), kwargs=mapped(wide, step.kwargs)) for step in program.steps]
    return replace(program, steps=tuple(steps))


def shaky_values(program: Program, refused: Any = ()) -> set[str]:
    """The names of plain results that change, too, where what rounds rounds otherwise and zeros lose their signs."""
    shaky: set[str] = set()
    refusals = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = snapshot(replay(Run(plain_leaf, plain_redistribute), program.steps, refused))
        for seed in range(_NUM_NOISES):
            try:
                noisy = snapshot(replay(Run(plain_leaf, plain_redistribute, 4.0, seed), program.steps, refused))
            except (RuntimeError, ValueError):
                refusals += 1  # torch refuses what has left its bounds
                continue
            shaky |= {key for key, value in expected.items() if not _is_alike(value, noisy.get(key))}
    return set(expected) if refusals == _NUM_NOISES else shaky


def _is_alike(value: Any, noisy: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return _is_same_plain(value, noisy)
    return isinstance(noisy, torch.Tensor) and value.shape == noisy.shape and is_close(value, noisy)


def _failed(program: Program, errors: Sequence[Exception | None]) -> Verdict:
    own = [error for error in errors if error is not None and not isinstance(error, CollectiveMismatchError)]
    if not own or any(isinstance(error, CollectiveTimeoutError) for error in own):
        error = (own or [error for error in errors if error is not None])[0]
        return Verdict(program, "hang", _described(error))
    apart = len(own) < len(errors) or len({type(error) for error in own}) > 1
    return Verdict(program, "apart" if apart else "raw", _described(own[0]))


def _described(error: Exception) -> str:
    notes = " ".join(getattr(error, "__notes__", []))
    return f"{notes}: {type(error).__name__}: {error}"
