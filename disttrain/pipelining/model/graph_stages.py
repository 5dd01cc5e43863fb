"""Cuts one graph into several. Each is a stage, and takes the values of earlier stages that it uses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from disttrain.errors import ScheduleError
from disttrain.pipelining.runtime.routes import Value


def cut_graph(
    traced: fx.GraphModule, model: nn.Module, mark: Callable[..., Any]
) -> tuple[tuple[fx.GraphModule, ...], tuple[tuple[Value, ...], ...]]:
    """The stages between calls of `mark`, and of each stage the values that it is given.

    The first stage takes all of the graph's inputs, the last gives all its outputs, a tuple.
    """
    stage_of = _assign(traced.graph, mark)
    num_stages = max(stage_of.values(), default=0) + 1
    (output,) = traced.graph.find_nodes(op="output")
    results = output.args[0]
    inputs_of: list[dict[fx.Node, None]] = [{} for _ in range(num_stages)]
    for node, stage in [*stage_of.items(), (output, num_stages - 1)]:
        for used in node.all_input_nodes:
            if used.op != "get_attr" and stage_of[used] < stage:
                inputs_of[stage][used] = None
    handed_on = [
        [node for node in traced.graph.nodes if stage_of.get(node) == stage and any(node in g for g in inputs_of)]
        for stage in range(num_stages)
    ]
    _check_sent([node for nodes in handed_on for node in nodes])
    inputs = tuple(
        tuple(sorted((stage_of[node], handed_on[stage_of[node]].index(node)) for node in nodes)) for nodes in inputs_of
    )
    names = _Names(traced, model)
    stages = []
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        sources = [handed_on[source][which] for source, which in inputs[stage]]
        stage_nodes = [node for node in traced.graph.nodes if stage_of.get(node) == stage]
        stages.append(_build(sources, stage_nodes, results if is_last else handed_on[stage], names, is_last=is_last))
    return tuple(stages), inputs


def _assign(graph: fx.Graph, mark: Callable[..., Any]) -> dict[fx.Node, int]:
    """The stage of each node that computes, or is an input."""
    stage_of: dict[fx.Node, int] = {}
    stage, is_empty = 0, True
    for node in graph.nodes:
        if node.op == "placeholder":
            stage_of[node] = 0
        elif node.op == "call_function" and node.target is mark:
            stage, is_empty = (stage, True) if is_empty else (stage + 1, True)
        elif node.op not in ("get_attr", "output"):
            # A value written to a buffer belongs to the stage that computed it; and a tuple of results is not sent as
            # one value.
            is_late = node.target in (torch.ops.aten.copy_.default, operator.getitem)
            earlier = [stage_of[used] for used in node.all_input_nodes if used.op != "get_attr"] if is_late else []
            stage_of[node] = max(earlier, default=stage)
            is_empty = is_empty and bool(earlier)
    # A mark behind everything else begins no stage: nothing was assigned to it.
    return stage_of


def _check_sent(nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise ScheduleError(
                "pipelining.pipeline",
                f"A later stage uses {node.name!r} of an earlier one, which is no tensor.",
                "Move the cut, or compute it on the later stage.",
            )


class _Names:
    """The graph's attributes, and their names in the model."""

    def __init__(self, traced: fx.GraphModule, model: nn.Module) -> None:
        self._traced = traced
        self._state = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        self.saved = set(model.state_dict())
        self._first = {id(tensor): name for name, tensor in reversed(self._state.items())}

    def find(self, target: str) -> tuple[str, Any]:
        tensor = self._state.get(target)
        if tensor is None:
            return target, operator.attrgetter(target)(self._traced)
        return self._first[id(tensor)], tensor


def _build(
    sources: Sequence[fx.Node], stage_nodes: Sequence[fx.Node], results: Any, names: _Names, *, is_last: bool
) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in sources}
    copies |= {node: graph.placeholder(node.name) for node in stage_nodes if node.op == "placeholder"}
    attributes: dict[str, Any] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            name, value = names.find(str(node.target))
            attributes[name] = value
            copies[node] = graph.get_attr(name)
        return copies[node]

    for node in stage_nodes:
        if node.op == "placeholder":
            continue
        if node.op == "call_module":
            name, attributes[str(node.target)] = names.find(str(node.target))
        copies[node] = graph.node_copy(node, copied)
    outputs = fx.node.map_arg(results, copied)
    graph.output(outputs[0] if len(outputs) == 1 and not is_last else tuple(outputs))
    stage = fx.GraphModule(attributes, graph)
    for name, buffer in list(stage.named_buffers()):
        if name not in names.saved:
            owner, _, key = name.rpartition(".")
            stage.get_submodule(owner).register_buffer(key, buffer, persistent=False)
    return stage
