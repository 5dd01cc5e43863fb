"""Products of matrices and their kin, by their equations: mark `+` stands before an operand that is added."""

from __future__ import annotations

from disttrain.dtensor.rules.axis_map import (
    BATCH_LETTERS,
    AxisMap,
    aligned_letters,
    operand_called,
    operand_names,
    signatures_of,
)
from disttrain.dtensor.rules.base import OpCall, Rule

_EQUATIONS = {
    "aten._int_mm": "mk,kn->mn",
    "aten.addbmm": "+mn,bmk,bkn->mn",
    "aten.addmm": "+mn,mk,kn->mn",
    "aten.addmv": "+m,mk,k->m",
    "aten.addr": "+mn,m,n->mn",
    "aten.baddbmm": "+bmn,bmk,bkn->bmn",
    "aten.bmm": "bmk,bkn->bmn",
    "aten.dot": "k,k->",
    "aten.mm": "mk,kn->mn",
    "aten.mv": "mk,k->m",
    "aten.vdot": "k,k->",
}


def contraction(call: OpCall) -> AxisMap:
    """Any letter may be cut, and the result is linear in each operand, together with what is added."""
    name = call.facts.name
    equation = _EQUATIONS.get(name) or _EQUATIONS[name[:-1]]
    terms, _, result = equation.partition("->")
    operands, added = {}, set()
    for operand, letters in zip(operand_names(call), terms.split(","), strict=True):
        operands[operand] = letters.removeprefix("+")
        if letters.startswith("+"):
            added.add(operand)
            spec = operand_called(call, operand)
            shape = () if spec is None else spec.shape
            operands[operand] = aligned_letters(result, shape, call.output_shape)
    return AxisMap(
        operands,
        (result,),
        sorted(set(terms) & set("bkmn")),
        frozenset(added),
        tuple(frozenset({operand, *added}) for operand in operands if operand not in added),
    )


def trilinear(call: OpCall) -> AxisMap:
    """`_trilinear` of a bilinear layer: three operands, each without the dims in which it is expanded."""
    names = operand_names(call)
    expanded = [frozenset(call.argument(f"expand{number}", ())) for number in (1, 2, 3)]
    first = call.operands[0]
    num_dims = len(expanded[0]) + (0 if first is None else len(first.shape))
    summed = frozenset(dim % num_dims for dim in call.argument("sumdim", ()))
    letters = BATCH_LETTERS[:num_dims]
    return AxisMap(
        {
            name: "".join(letter for dim, letter in enumerate(letters) if dim not in missing)
            for name, missing in zip(names, expanded, strict=True)
        },
        ("".join(letter for dim, letter in enumerate(letters) if dim not in summed),),
        letters,
        linear=tuple(frozenset({name}) for name in names),
    )


def distances(call: OpCall) -> AxisMap | None:
    """Distances of all rows of one matrix from all rows of another; a row stays whole."""
    rows = [operand_called(call, name) for name in ("x1", "x2")]
    if rows[0] is None or rows[1] is None:
        return None
    num_batch_dims = len(call.output_shape) - 2
    batch = BATCH_LETTERS[:num_batch_dims]
    operands = {
        name: aligned_letters(batch, spec.shape[:-2], call.output_shape[:-2]) + letter + "."
        for name, spec, letter in zip(("x1", "x2"), rows, ("m", "n"), strict=True)
        if spec is not None
    }
    return AxisMap(operands, (batch + "mn",), batch + "mn")


RULES = {
    **{name: Rule(signatures_of(contraction)) for name in _EQUATIONS},
    "aten._cdist_forward": Rule(signatures_of(distances)),
    "aten._euclidean_dist": Rule(signatures_of(distances)),
    "aten._trilinear": Rule(signatures_of(trilinear)),
}
