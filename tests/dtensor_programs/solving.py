"""Steps of linear algebra beyond products, and those on complex numbers."""

from __future__ import annotations

import torch

from tests.dtensor_programs.draw import Draw, Value

L = "torch.linalg."


def positive(draw: Draw) -> Value | None:
    """Square matrices of float64 that are symmetric and positive definite: x @ x.T + 1."""
    x = draw.pick(lambda value: value.tensor.dtype == torch.float64 and 2 <= value.ndim <= 3)
    if x is None or draw.random.random() < 0.4:
        x = draw.leaf(draw.shape(2, 3), torch.float64)
    for turned in draw.do(".transpose", x, -1, -2):
        for product in draw.do("torch.matmul", x, turned):
            for diagonal in draw.do(".diagonal", product, 0, -2, -1):
                for one in draw.do("torch.ones_like", diagonal):
                    for unit in draw.do("torch.diag_embed", one):
                        found: list[Value] = draw.do(".add", product, unit)
                        return found[0] if found else None
    return None


def solve(draw: Draw) -> None:
    matrix = positive(draw)
    if matrix is None:
        return
    other = draw.exactly((*matrix.shape[:-1], draw.random.choice((1, 2))), torch.float64)
    kind = draw.name(
        "cholesky cholesky inv solve solve slogdet lu_factor pinv matrix_exp qr svdvals eigvalsh ldl_factor"
    )
    if kind == "solve":
        draw.do(L + kind, matrix, other, rounds=True)
        return
    found = draw.do(L + kind, matrix, rounds=True)
    if kind == "cholesky" and found:
        how = draw.name("cholesky_solve cholesky_inverse solve_triangular")
        if how == "cholesky_solve":
            draw.do("torch.cholesky_solve", other, found[0], rounds=True)
        elif how == "cholesky_inverse":
            draw.do("torch.cholesky_inverse", found[0], rounds=True)
        else:
            draw.do(L + how, found[0], other, upper=False, rounds=True)
    elif kind in ("lu_factor", "ldl_factor") and found:
        draw.do(L + kind.replace("factor", "solve"), *found, other, rounds=True)


def of_two_parts(draw: Draw) -> None:
    """Complex numbers of two real ones, and what is made of them."""
    x = draw.floating(1, 3)
    kind = draw.name("complex polar view_as_complex fft rfft fft2")
    if kind in ("complex", "polar"):
        draw.do(f"torch.{kind}", x, draw.exactly(x.shape, x.tensor.dtype), rounds=kind == "polar")
    elif kind == "view_as_complex":
        draw.do("torch.view_as_complex", draw.exactly((*x.shape[:2], 2), torch.float64))
    elif kind == "fft2":
        draw.do("torch.fft.fft2", x, rounds=True)
    else:
        draw.do(f"torch.fft.{kind}", x, dim=draw.dim(x), rounds=True)


def complexly(draw: Draw) -> None:
    z = draw.pick(lambda value: value.tensor.is_complex())
    if z is None:
        of_two_parts(draw)
        return
    kind = draw.name(
        "view_as_real real imag abs angle conj resolve_conj ifft irfft hfft mul add matmul sum mean vdot mul_ exp index"
    )
    if kind in ("view_as_real", "real", "imag", "conj", "resolve_conj"):
        draw.do(f"torch.{kind}", z)
    elif kind in ("ifft", "irfft", "hfft"):
        draw.do(f"torch.fft.{kind}", z, dim=draw.dim(z), rounds=True)
    elif kind in ("mul", "add", "mul_"):
        other = draw.pick(lambda value: value.shape == z.shape)
        draw.do(f".{kind}", z, other or 2, rounds=True)
    elif kind == "matmul" and z.ndim > 1:
        for turned in draw.do(".transpose", z, -1, -2):
            for conjugate in draw.do("torch.conj", turned):
                draw.do("torch.matmul", z, conjugate, rounds=True)
    elif kind == "vdot":
        draw.do("torch.vdot", z, z, rounds=True)
    elif kind == "index" and z.ndim:
        draw.do("operator.getitem", z, draw.random.choice((slice(1, None), 0, -1)))
    else:
        draw.do(f".{kind}", z, rounds=True)


FAMILIES = {solve: 2, of_two_parts: 1, complexly: 3}
