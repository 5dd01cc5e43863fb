"""torch's state dict functions, ours beside torch's own on the same models: results, names, and what is refused."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn

import disttrain.checkpoint.state_dict as ours
from disttrain.checkpoint import load, save
from disttrain.dtensor import DTensor
from disttrain.errors import StateDictError
from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads

FUNCTIONS = [name for name in ours.__all__ if name != "StateDictOptions"]
OPTIONS = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "full-cpu": {"full_state_dict": True, "cpu_offload": True},
    "cpu": {"cpu_offload": True},
    "trained": {"ignore_frozen_params": True, "strict": False},
}
OPTIMIZERS = {
    "adamw": lambda weights, rest: torch.optim.AdamW([*weights, *rest], lr=0.1, amsgrad=True),
    "groups": lambda weights, rest: torch.optim.Adam([{"params": weights, "lr": 0.5}, {"params": rest}], lr=0.25),
    "momentum": lambda weights, rest: torch.optim.SGD([*rest, *weights], lr=0.1, momentum=0.9),
    "tensor-lr": lambda weights, rest: torch.optim.AdamW([*weights, *rest], lr=torch.tensor(0.1)),
}


class Model(nn.Module):
    """A tied weight, buffers, a frozen parameter, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.inner[0].weight
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.tied(self.inner(x))


def make(kind: str, seed: int = 1, num_steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = OPTIMIZERS[kind](weights, [parameter for parameter in model.parameters() if parameter.ndim < 2])
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 20).view(5, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def plain(value: Any) -> Any:
    """Comparable; torch makes lists of the tuples of whole states."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), str(value.device), value.tolist()]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_results_are_torchs(kind: str, options: str, num_steps: int) -> None:
    found = []
    for module in (theirs, ours):
        model, optimizer = make(kind, num_steps=num_steps)
        chosen = module.StateDictOptions(**OPTIONS[options])
        model_state, optimizer_state = module.get_state_dict(model, optimizer, options=chosen)
        again, its_optimizer = make(kind, seed=2, num_steps=0)
        keys = module.set_state_dict(
            again,
            its_optimizer,
            model_state_dict=copy.deepcopy(model_state),
            optim_state_dict=copy.deepcopy(optimizer_state),
            options=chosen,
        )
        step(again, its_optimizer)
        states = [model_state, optimizer_state, list(keys), again.state_dict(), its_optimizer.state_dict()]
        found.append([plain(state) for state in states])
    assert found[0] == found[1]


def test_signatures_are_torchs() -> None:
    for name in FUNCTIONS:
        expected, found = (inspect.signature(getattr(module, name)).parameters for module in (theirs, ours))
        assert [(key, item.kind, item.default) for key, item in found.items()] == [
            (key, item.kind, item.default) for key, item in expected.items()
        ]
    assert vars(ours.StateDictOptions()) == vars(theirs.StateDictOptions())


def test_torchs_own_line_saves_and_loads(tmp_path: Path) -> None:
    model, optimizer = make("adamw")
    model_state, optimizer_state = ours.get_state_dict(model, optimizer)
    save({"model": model_state, "optim": optimizer_state}, tmp_path / "save")
    other, other_optimizer = make("adamw", seed=2, num_steps=0)
    model_state, optimizer_state = ours.get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    load(state, tmp_path / "save")
    ours.set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
        assert plain(other.state_dict()) == plain(model.state_dict())
    assert plain(other_optimizer.state_dict()) == plain(optimizer.state_dict())


def test_several_optimizers_are_one_state_and_may_be_cut_otherwise() -> None:
    torch.manual_seed(0)
    model = Model()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    first = (torch.optim.AdamW(weights, lr=0.5), torch.optim.AdamW(rest, lr=0.25))
    step(model, *first)
    expected = theirs.get_optimizer_state_dict(model, first)
    assert plain(ours.get_optimizer_state_dict(model, first)) == plain(expected)
    for options in (None, ours.StateDictOptions(flatten_optimizer_state_dict=True)):
        state = ours.get_optimizer_state_dict(model, first, options=options)
        one = torch.optim.AdamW([{"params": rest[::-1]}, {"params": weights[:1]}, {"params": weights[1:]}])
        ours.set_optimizer_state_dict(model, one, state)
        assert [group["lr"] for group in one.param_groups] == [0.25, 0.5, 0.5]
        assert all(
            torch.equal(one.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
            for optimizer in first
            for parameter in optimizer.state
        )
        with pytest.raises(StateDictError, match="are in one group now, but had options"):
            ours.set_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), state)


@pytest.mark.parametrize("options", ["plain", "flat", "full"])
def test_optimizers_without_a_state(options: str) -> None:
    torch.manual_seed(0)
    model = Model()
    chosen = ours.StateDictOptions(**OPTIONS[options])
    first = [torch.optim.SGD([model.scale], lr=0.5), torch.optim.SGD(model.inner.parameters(), lr=0.25)]
    state = ours.get_optimizer_state_dict(model, first, options=chosen)
    again = [torch.optim.SGD(model.inner.parameters()), torch.optim.SGD([model.scale])]
    ours.set_optimizer_state_dict(model, again, state, options=chosen)
    assert [optimizer.param_groups[0]["lr"] for optimizer in again] == [0.25, 0.5]
    assert [len(optimizer.state) for optimizer in again] == [0, 0]
    adam = torch.optim.Adam([model.scale], betas=(0.5, 0.75))
    state = ours.get_optimizer_state_dict(model, adam, options=chosen)
    other = torch.optim.Adam([model.scale])
    ours.set_optimizer_state_dict(model, other, state, options=chosen)
    assert other.param_groups[0]["betas"] == (0.5, 0.75)


def test_an_optimizer_that_needs_a_closure() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = (model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])) - 1).square().sum()
            value.backward()
            return value

        optimizer.step(loss)

    model, optimizer = made()
    ours.get_state_dict(model, optimizer)
    step(model, optimizer)
    other, its_optimizer = made()
    model_state, state = copy.deepcopy(ours.get_state_dict(model, optimizer))
    ours.set_state_dict(other, its_optimizer, model_state_dict=model_state, optim_state_dict=state)
    for one in ((model, optimizer), (other, its_optimizer)):
        step(*one)
    assert plain(other.state_dict()) == plain(model.state_dict())


def test_a_wrapped_model_has_the_names_of_the_plain_one() -> None:
    model, optimizer = make("adamw")
    expected = plain(ours.get_state_dict(model, optimizer))
    compiled = torch.compile(model, backend="eager")
    found = ours.get_state_dict(compiled, optimizer)
    assert plain(found) == expected == plain(theirs.get_state_dict(compiled, optimizer))
    given = {name: torch.zeros_like(value) for name, value in found[0].items()}
    keys = ours.set_model_state_dict(compiled, given)
    assert [list(names) for names in keys] == [[], []]
    assert set(given) == set(expected[0])
    assert all(not tensor.any() for tensor in model.state_dict().values())


class Hidden(nn.Module):
    """Its keys leave out `base`, as adapters' do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.compile(nn.Linear(2, 2), backend="eager")
        self.register_state_dict_post_hook(self._leave_out)
        self.register_load_state_dict_pre_hook(self._put_in)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "base", "bias": "base", "_orig_mod": "base"}

    @staticmethod
    def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}base.")]:
            state[prefix + key.removeprefix(f"{prefix}base.")] = state.pop(key)

    @staticmethod
    def _put_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}base.{key.removeprefix(prefix)}"] = state.pop(key)


def test_names_may_leave_out_a_child() -> None:
    model = nn.Sequential(Hidden())
    state = ours.get_model_state_dict(model)
    assert sorted(state) == ["0.bias", "0.weight"]
    ours.set_model_state_dict(model, {name: torch.ones_like(value) for name, value in state.items()})
    assert model[0].base.weight.tolist() == [[1, 1], [1, 1]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_submodules_alone() -> None:
    for keeps in (True, False):
        found = []
        for module in (theirs, ours):
            model, optimizer = make("adamw")
            options = module.StateDictOptions(keep_submodule_prefixes=keeps)
            of_model = module.get_model_state_dict(model, submodules={model.inner}, options=options)
            found.append([plain(of_model), plain(module.get_state_dict(model, optimizer, submodules={model.tied}))])
        assert found[0] == found[1]
    model, _ = make("adamw")
    ours.set_model_state_dict(
        model, {model.inner[0]: {"bias": torch.zeros(3)}}, options=ours.StateDictOptions(strict=False)
    )
    assert model.inner[0].bias.tolist() == [0, 0, 0]


def test_a_model_without_memory_is_given_some() -> None:
    model, _ = make("adamw")
    options = ours.StateDictOptions(full_state_dict=True)
    with torch.device("meta"):
        other = Model()
    ours.set_model_state_dict(other, ours.get_model_state_dict(model, options=options), options=options)
    assert plain(other.state_dict()) == plain(model.state_dict())


def test_the_state_of_kernels_optimizers() -> None:
    from disttrain.kernels import AdamW  # here, since few tests need it

    def made(num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3).bfloat16()
        optimizer = AdamW(model.parameters(), lr=0.1, state_dtype=torch.float32)
        for _ in range(num_steps):
            model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = made(2)
    expected = plain(optimizer.state_dict())
    for options in (None, ours.StateDictOptions(full_state_dict=True)):
        other, other_optimizer = made(0)
        model_state, state = ours.get_state_dict(model, optimizer, options=options)
        ours.set_state_dict(
            other, other_optimizer, model_state_dict=model_state, optim_state_dict=state, options=options
        )
        assert plain(other_optimizer.state_dict()["state"]) == expected["state"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda model, optimizer: ours.get_optimizer_state_dict(model, ()), "there are no optimizers"),
        (
            lambda model, optimizer: ours.get_state_dict(model, torch.optim.SGD([nn.Parameter(torch.ones(7))])),
            r"a parameter of shape \(7,\) that the model has not",
        ),
        (lambda model, optimizer: ours.get_state_dict(model, [optimizer, optimizer]), "is in two optimizers"),
        (lambda model, optimizer: ours.get_model_state_dict(nn.Identity()), "the model has no state"),
        (lambda model, optimizer: ours.set_model_state_dict(model, {}), "the model's state dict is empty"),
        (lambda model, optimizer: ours.set_model_state_dict(model, {"x": torch.ones(1)}), r"Missing key\(s\)"),
        (
            lambda model, optimizer: ours.set_model_state_dict(
                model,
                {**model.state_dict(), "frozen": torch.ones(3)},
                options=ours.StateDictOptions(full_state_dict=True),
            ),
            "size mismatch for frozen",
        ),
        (
            lambda model, optimizer: ours.get_model_state_dict(
                model, options=ours.StateDictOptions(broadcast_from_rank0=True)
            ),
            "broadcast_from_rank0 is True, full_state_dict is False",
        ),
        (lambda model, optimizer: ours.set_optimizer_state_dict(model, optimizer, {}), "state dict is empty"),
        (
            lambda model, optimizer: ours.set_optimizer_state_dict(model, optimizer, {"x": 1}),
            r"the optimizers' state dict has \['x'\]",
        ),
        (
            lambda model, optimizer: ours.set_optimizer_state_dict(
                model, optimizer, {**ours.get_optimizer_state_dict(model, optimizer), "state": {}}
            ),
            "the state of parameter 'inner.0.weight' is missing",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Any, sentence: str) -> None:
    model, optimizer = make("adamw")
    with pytest.raises(StateDictError, match=sentence) as raised:
        call(model, optimizer)
    assert isinstance(raised.value, RuntimeError)


def test_whole_states_are_strict_too() -> None:
    """torch fills what is missing from the model itself, and tells nobody."""
    model, _ = make("adamw")
    state = ours.get_model_state_dict(model)
    del state["scale"]
    with pytest.raises(StateDictError, match=r"Missing key\(s\) in state_dict: \"scale\""):
        ours.set_model_state_dict(model, state, options=ours.StateDictOptions(full_state_dict=True))
    options = ours.StateDictOptions(full_state_dict=True, strict=False)
    keys = ours.set_model_state_dict(model, {**state, "more": torch.ones(1)}, options=options)
    assert (keys.missing_keys, keys.unexpected_keys) == (["scale"], ["more"])


@pytest.mark.parametrize("is_flat", [False, True])
def test_an_optimizer_that_cannot_have_a_state_yet_takes_its_parts(is_flat: bool) -> None:
    """There are gradients, so none is made by a step without effect."""
    options = ours.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=is_flat)

    def body() -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(6, 5))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        other = torch.optim.AdamW(model.parameters())
        ours.set_optimizer_state_dict(
            model, other, ours.get_optimizer_state_dict(model, optimizer, options=options), options=options
        )
        for parameter, values in optimizer.state.items():
            for name, value in values.items():
                found = other.state[parameter][name]
                assert type(found) is type(value)
                assert torch.equal(*(one.full_tensor() if isinstance(one, DTensor) else one for one in (value, found)))
        other.step()

    run_threads(2, body)
