"""Steps that are the functions of layers and losses, and of linear algebra."""

from __future__ import annotations

import torch

from tests.dtensor_programs.draw import Draw, Value

F = "torch.nn.functional."


def soften(draw: Draw) -> None:
    x = draw.floating(1)
    name = draw.name("softmax log_softmax softmin logsumexp glu")
    draw.do(f"torch.{name}" if name == "logsumexp" else F + name, x, draw.dim(x), rounds=True)


def normalize(draw: Draw) -> None:
    x = draw.floating(1, 4)
    dtype = x.tensor.dtype
    kind = draw.name("layer_norm layer_norm rms_norm group_norm batch_norm instance_norm")
    if kind in ("layer_norm", "rms_norm"):
        shape = x.shape[-draw.random.randint(1, x.ndim) :]
        weight = draw.exactly(shape, dtype) if draw.random.random() < 0.7 else None
        others = (weight,) if kind == "rms_norm" else (weight, draw.exactly(shape, dtype) if weight else None)
        draw.do(F + kind, x, shape, *others, rounds=True)
    elif kind == "group_norm" and x.ndim > 1:
        draw.do(F + kind, x, draw.random.choice((1, 2, x.shape[1])), draw.exactly((x.shape[1],), dtype), rounds=True)
    elif kind == "batch_norm" and x.ndim > 1:
        channels = (x.shape[1],)
        draw.do(
            F + kind, x, None, None, draw.exactly(channels, dtype), draw.exactly(channels, dtype), True, rounds=True
        )
    elif x.ndim > 2:
        draw.do(F + "instance_norm", x, rounds=True)


def lose(draw: Draw) -> None:
    x = draw.floating(1, 3)
    dtype = x.tensor.dtype
    how = draw.random.choice(("mean", "sum", "none"))
    kind = draw.random.choice(
        (
            "cross_entropy",
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "bce_logits",
            "kl_div",
            "huber_loss",
            "cosine_similarity",
            "soft targets",
        )
    )
    if kind in ("cross_entropy", "nll_loss") and x.ndim > 1:
        target = draw.indices((x.shape[0], *x.shape[2:]), x.shape[1])
        keywords = {"label_smoothing": 0.1} if kind == "cross_entropy" and draw.random.random() < 0.4 else {}
        draw.do(F + kind, x, target, reduction=how, rounds=True, **keywords)
    elif kind == "soft targets" and x.ndim > 1:
        draw.do(F + "cross_entropy", x, draw.exactly(x.shape, dtype), reduction=how, rounds=True)
    elif kind == "bce_logits":
        draw.do(F + "binary_cross_entropy_with_logits", x, draw.exactly(x.shape, dtype), reduction=how, rounds=True)
    elif kind == "cosine_similarity":
        draw.do(F + kind, x, draw.exactly(x.shape, dtype), dim=draw.dim(x), rounds=True)
    elif kind in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"):
        draw.do(F + kind, x, draw.exactly(x.shape, dtype), reduction=how, rounds=True)


def lose_by_margin(draw: Draw) -> None:
    """Losses of other kinds of targets."""
    x = draw.floating(1, 3)
    dtype = x.tensor.dtype
    how = draw.random.choice(("mean", "sum", "none"))
    kind = draw.name(
        "binary_cross_entropy multi_margin_loss multilabel_margin_loss soft_margin_loss gaussian_nll_loss"
        " poisson_nll_loss hinge_embedding_loss"
    )
    if kind == "binary_cross_entropy":
        for share in draw.do(".sigmoid", x, rounds=True):
            for target in draw.do(".gt", draw.exactly(x.shape, dtype), 0):
                for number in draw.do(".to", target, dtype):
                    draw.do(F + kind, share, number, reduction=how, rounds=True)
    elif kind in ("multi_margin_loss", "multilabel_margin_loss"):
        if x.ndim == 2:
            shape = x.shape[:1] if kind == "multi_margin_loss" else x.shape
            draw.do(F + kind, x, draw.indices(shape, x.shape[1]), reduction=how, rounds=True)
    elif kind == "gaussian_nll_loss":
        for square in draw.do(".square", draw.exactly(x.shape, dtype)):
            draw.do(F + kind, x, draw.exactly(x.shape, dtype), square, reduction=how, rounds=True)
    else:
        draw.do(F + kind, x, draw.exactly(x.shape, dtype), reduction=how, rounds=True)


def layer(draw: Draw) -> None:
    x = draw.floating(2, 4)
    dtype = x.tensor.dtype
    kind = draw.name("embedding conv1d avg_pool1d max_pool1d sdpa bilinear interpolate cdist")
    if kind == "embedding" and x.ndim == 2:
        draw.do(F + kind, draw.indices(draw.shape(1, 2), x.shape[0]), x)
    elif kind == "conv1d" and x.ndim == 3:
        draw.do(
            F + kind,
            x,
            draw.exactly((2, x.shape[1], draw.random.choice((1, 2, 3))), dtype),
            padding=draw.random.choice((0, 1)),
            stride=draw.random.choice((1, 2)),
        )
    elif kind in ("avg_pool1d", "max_pool1d") and x.ndim == 3:
        draw.do(F + kind, x, 2, rounds=kind == "avg_pool1d")
    elif kind == "sdpa" and x.ndim >= 3:
        draw.do(
            F + "scaled_dot_product_attention",
            x,
            draw.exactly(x.shape, dtype),
            draw.exactly(x.shape, dtype),
            is_causal=draw.random.random() < 0.5,
            rounds=True,
        )
    elif kind == "cdist" and x.ndim in (2, 3):
        draw.do("torch.cdist", x, draw.exactly(x.shape, dtype), rounds=True)
    elif kind == "interpolate" and x.ndim >= 3:
        draw.do(F + kind, x, scale_factor=2, mode="nearest")
    elif x.ndim == 2:
        draw.do(F + "bilinear", x, draw.exactly(x.shape, dtype), draw.exactly((2, x.shape[1], x.shape[1]), dtype))


def bend(draw: Draw) -> None:
    """Layers that choose or weigh elements one by one."""
    x = draw.floating(2, 4)
    dtype = x.tensor.dtype
    kind = draw.name("embedding_bag prelu threshold dropout evaluate")
    if kind == "embedding_bag" and x.ndim == 2:
        _look_up_bags(draw, x)
    elif kind == "prelu":
        draw.do(F + kind, x, draw.exactly((draw.random.choice((1, x.shape[1])),), dtype), rounds=True)
    elif kind == "threshold":
        draw.do(F + kind, x, draw.random.choice((0.0, 0.5, -1.0)), 2.0)
    elif kind == "dropout":
        # What is drawn is other tests' matter: here nothing is, or all.
        draw.do(F + kind, x, draw.random.choice((0.0, 1.0)), True)
    elif kind == "evaluate":
        mean, weight, bias = (draw.exactly((x.shape[1],), dtype) for _ in range(3))
        for variance in draw.do(".abs", weight):
            draw.do(F + "batch_norm", x, mean, variance, weight, bias, False, rounds=True)


def _look_up_bags(draw: Draw, table: Value) -> None:
    how, dtype = draw.name("sum mean max"), table.tensor.dtype
    if draw.random.random() < 0.5:
        index = draw.indices(draw.shape(2, 2), table.shape[0])
        weights = draw.exactly(index.shape, dtype) if how == "sum" and draw.random.random() < 0.5 else None
        draw.do(F + "embedding_bag", index, table, mode=how, per_sample_weights=weights, rounds=True)
        return
    index = draw.indices((draw.random.randint(1, 5),), table.shape[0])
    # Bags begin at zero, and one after the other.
    for counted in draw.do(".cumsum", draw.indices((draw.random.randint(1, 3),), 3), 0):
        for kept in draw.do(".clamp", counted, 0, index.shape[0]):
            for first in draw.do("operator.getitem", kept, slice(0, 1)):
                for begins in draw.do(".sub", kept, first):
                    draw.do(F + "embedding_bag", index, table, begins, mode=how, rounds=True)


def algebra(draw: Draw) -> None:
    x = draw.floating(2, 3)
    kind = draw.name("trace det inv cross diag diag_embed matrix_power trace")
    if kind in ("det", "inv"):
        if x.shape[-1] == x.shape[-2] and x.tensor.dtype == torch.float64:
            regular = draw.do("torch.matmul", x, x.tensor.ndim and x)
            draw.do(f"torch.linalg.{kind}", (regular or [x])[0], rounds=True)
    elif kind == "cross":
        draw.do("torch.linalg.cross", x, draw.exactly(x.shape, x.tensor.dtype), dim=draw.dim(x))
    elif kind == "diag_embed":
        draw.do(".diag_embed", x)
    elif kind == "matrix_power":
        draw.do("torch.linalg.matrix_power", x, 2)
    else:
        draw.do(f"torch.{kind}", x)


def setting(draw: Draw) -> None:
    """A gradient in the middle of a program, or a tensor that gets one."""
    x = draw.floating()
    if draw.random.random() < 0.5:
        for own in draw.do(".detach", x) if draw.random.random() < 0.5 else [x]:
            draw.do(".requires_grad_", own)
    else:
        draw.do("backward", x)


FAMILIES = {soften: 3, normalize: 3, lose: 4, lose_by_margin: 1, layer: 3, bend: 2, algebra: 2, setting: 1}
