"""Steps that put in order, count and look up."""

from __future__ import annotations

from tests.dtensor_programs.draw import Draw, Value


def order(draw: Draw) -> None:
    x = draw.floating(1, 3)
    dim = draw.dim(x)
    size = max(1, x.shape[dim])
    kind = draw.name("sort argsort topk kthvalue msort quantile median aminmax mode nanmedian")
    is_down = draw.random.random() < 0.5
    if kind == "sort":
        draw.do("torch.sort", x, dim=dim, descending=is_down, stable=True)
    elif kind == "argsort":
        draw.do("torch.argsort", x, dim=dim, descending=is_down, stable=True)
    elif kind == "topk":
        found = draw.do("torch.topk", x, draw.random.randint(1, size), dim, is_down)
        # Which of several equal elements are taken is nobody's promise.
        _forget_places(draw, found)
    elif kind == "kthvalue":
        _forget_places(draw, draw.do("torch.kthvalue", x, draw.random.randint(1, size), dim))
    elif kind == "quantile":
        draw.do("torch.quantile", x, draw.random.choice((0.25, 0.5, 1.0)), dim, rounds=True)
    elif kind in ("median", "nanmedian", "mode"):
        _forget_places(draw, draw.do(f"torch.{kind}", x, dim))
    elif kind == "aminmax":
        draw.do("torch.aminmax", x, dim=dim)
    else:
        draw.do("torch.msort", x)


def _forget_places(draw: Draw, found: list[Value]) -> None:
    draw.values = [value for value in draw.values if value not in found[1:]]


def count(draw: Draw) -> None:
    x = draw.floating(1, 2)
    kind = draw.name("bincount one_hot searchsorted bucketize histc unique nonzero isin")
    if kind in ("bincount", "one_hot"):
        index = draw.indices(draw.shape(1, 1) if kind == "bincount" else draw.shape(1, 2), 4)
        draw.do(
            "torch.bincount" if kind == "bincount" else "torch.nn.functional.one_hot",
            index,
            *(() if kind == "bincount" else (4,)),
        )
    elif kind in ("searchsorted", "bucketize"):
        edges = draw.do("torch.msort", draw.leaf(draw.shape(1, 1), x.tensor.dtype))
        if edges and kind == "searchsorted":
            draw.do("torch.searchsorted", edges[0], draw.random.choice((x, 0.5)))
        elif edges:
            draw.do("torch.bucketize", x, edges[0], right=draw.random.random() < 0.5)
    elif kind == "histc":
        draw.do("torch.histc", x, 4, -2, 2)
    elif kind == "unique":
        draw.do("torch.unique", x)
    elif kind == "nonzero":
        draw.do("torch.nonzero", x)
    elif draw.random.random() < 0.5:
        draw.do("torch.isin", x, draw.exactly((3,), x.tensor.dtype))
    else:
        draw.do("torch.isin", x, 0.5)


def number(draw: Draw) -> None:
    x = draw.any()
    kind = draw.name(".item .tolist torch.equal torch.allclose .any .numel .stride")
    if kind in ("torch.equal", "torch.allclose"):
        draw.do(kind, x, draw.exactly(x.shape, x.tensor.dtype))
    else:
        draw.do(kind, x)


FAMILIES = {order: 4, count: 2, number: 1}
