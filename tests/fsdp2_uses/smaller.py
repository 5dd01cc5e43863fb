"""Smaller programs: fewer uses, ranks and parts, and simpler ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tests.fsdp2_uses.models import Node, Shard
from tests.fsdp2_uses.programs import Program, Use
from tests.fuzz.shrinking import without_some


def smaller(program: Program) -> Iterator[Program]:
    """In the order in which they are worth a try."""
    for uses in without_some(program.uses):
        yield dataclasses.replace(program, uses=uses)
    for model in _smaller_models(program.model):
        yield dataclasses.replace(program, model=model)
    for mesh in ((1,), (2,), (1, 2), (2, 1), (3,)):
        if len(mesh) < len(program.mesh) or (len(mesh) == len(program.mesh) and mesh < program.mesh):
            yield dataclasses.replace(program, mesh=mesh)
    for place, use in enumerate(program.uses):
        for simpler in _simpler_uses(use):
            yield dataclasses.replace(program, uses=(*program.uses[:place], simpler, *program.uses[place + 1 :]))


def _smaller_models(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        if node.shard is not None and child.shard is None:
            yield dataclasses.replace(child, shard=node.shard)
    for children in without_some(node.children):
        yield dataclasses.replace(node, children=children)
    if node.shard is not None:
        yield dataclasses.replace(node, shard=None)
        if node.shard != Shard():
            yield dataclasses.replace(node, shard=Shard())
    if node.kind not in ("seq", "scale"):
        yield dataclasses.replace(node, kind="seq" if node.children else "scale")
    if node.io != "plain":
        yield dataclasses.replace(node, io="plain")
    if node.frozen:
        yield dataclasses.replace(node, frozen=False)
    for place, child in enumerate(node.children):
        for simpler in _smaller_models(child):
            yield dataclasses.replace(node, children=(*node.children[:place], simpler, *node.children[place + 1 :]))


def _simpler_uses(use: Use) -> Iterator[Use]:
    for key, value in use.options.items():
        simple = {int: 0, bool: False, tuple: ()}.get(type(value), value)
        if value != simple:
            yield Use(use.name, **{**use.options, key: simple})
