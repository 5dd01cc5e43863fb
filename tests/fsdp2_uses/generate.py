"""A program of a seed."""

from __future__ import annotations

from random import Random

from tests.fsdp2_uses.models import CONTAINERS, IO, LEAVES, Node, Shard
from tests.fsdp2_uses.programs import Program, Use

MESHES = (
    (1,),
    (2,),
    (2,),
    (2,),
    (3,),
    (3,),
    (4,),
    (1, 1),
    (1, 2),
    (2, 1),
    (2, 2),
    (2, 2),
    (1, 3),
    (3, 1),
    (4, 1),
    (1, 4),
)

TRANSFERS = ("", "", "in place", "apart", "pairs", "all as one")
RESHARDS = (None, None, True, False)


def program_of(seed: int) -> Program:
    """The program that belongs to this seed."""
    random = Random(seed)
    mesh = random.choice(MESHES)
    num_parts = random.choice((2, 4, 6, 9))
    policies = ("",) if random.random() < 0.7 else ("", "compute", "reduce", "both", "no cast")
    model = _Models(random, mesh[-1], policies).tree(num_parts)
    return Program(mesh, model, tuple(_uses(random, random.choice((4, 8, 14)))), seed)


class _Models:
    def __init__(self, random: Random, num_shards: int, policies: tuple[str, ...]) -> None:
        self._random = random
        self._policies = policies
        # One for all parts: what differs does not go together.
        self._transfers = random.choice(TRANSFERS)
        self._reshards = (*RESHARDS, *(number for number in range(1, num_shards + 1) if num_shards % number == 0))

    def tree(self, num_parts: int) -> Node:
        """A root with about as many parts."""
        return self._node(num_parts, is_sharded=self._random.random() < 0.85, depth=0)

    def _node(self, num_parts: int, *, is_sharded: bool, depth: int) -> Node:
        random = self._random
        io = random.choice(IO) if depth and random.random() < 0.3 else "plain"
        frozen = random.random() < 0.08
        if num_parts <= 1 or depth > 3:
            kind = "linear" if random.random() < 0.4 else random.choice(LEAVES)
            return Node(kind, (), self._shard() if is_sharded else None, io, frozen)
        kind = "seq" if random.random() < 0.4 else random.choice(CONTAINERS)
        children, left = [], num_parts - 1
        while left > 0:
            size = random.randint(1, left)
            children.append(self._node(size, is_sharded=random.random() < 0.35, depth=depth + 1))
            left -= size
        how = self._shard() if is_sharded else None
        if how is None and kind == "seq" and random.random() < 0.15:
            how = self._shard(together=True)
        return Node(kind, tuple(children), how, io)

    def _shard(self, together: bool = False) -> Shard:
        random = self._random
        return Shard(
            random.choice(self._reshards),
            random.choice(self._policies),
            random.random() < 0.2,
            together,
            random.random() < 0.1,
            self._transfers,
        )


def _uses(random: Random, count: int) -> list[Use]:
    """Mostly training; all else in between."""
    uses = [Use("optimizer", kind=_kind(random))] if random.random() < 0.6 else []
    while len(uses) < count:
        uses += _iteration(random) if random.random() < 0.4 else [_use(random)]
    return uses


def _kind(random: Random) -> str:
    return random.choice(("sgd", "momentum", "adam", "adamw", "foreach"))


def _iteration(random: Random) -> list[Use]:
    uses = [_forward(random) for _ in range(random.choice((1, 1, 1, 2)))]
    uses.append(Use("backward", which=random.randint(0, 2), together=random.random() < 0.3))
    if random.random() < 0.3:
        uses.append(Use("clip", norm=random.choice((0.01, 1e9))))
    if random.random() < 0.7:
        uses.append(Use("step", which=random.randint(0, 2)))
        uses.append(_zero_grad(random))
    return uses


def _forward(random: Random) -> Use:
    at = random.randint(1, 5) if random.random() < 0.15 else 0
    mode = random.choice(("train", "train", "train", "train", "no_grad", "inference"))
    return Use("forward", batch=random.randint(0, 99), at=at, mode=mode, asks=random.random() < 0.3)


def _zero_grad(random: Random) -> Use:
    by = random.choice(("model", "optimizer"))
    return Use("zero_grad", set_to_none=random.random() < 0.7, by=by, which=random.randint(0, 2))


def _flag(random: Random) -> bool:
    return random.random() < 0.5


def _which(random: Random) -> int:
    return random.randint(0, 20)


MAKERS = (
    _forward,
    _forward,
    lambda r: Use("backward", which=r.randint(0, 2), retain=_flag(r), together=r.random() < 0.3),
    lambda r: Use("backward", which=r.randint(0, 2), retain=r.random() < 0.8),
    lambda r: Use("step", which=r.randint(0, 2)),
    _zero_grad,
    lambda r: Use("method", batch=_which(r), mode=r.choice(("train", "no_grad"))),
    lambda r: Use("input_gradients", batch=_which(r)),
    lambda r: Use(
        "raise_in_forward", batch=_which(r), at=_which(r), before=_flag(r), mode=r.choice(("train", "train", "no_grad"))
    ),
    lambda r: Use("raise_in_backward", batch=_which(r), at=_which(r), before=_flag(r)),
    lambda r: Use("optimizer", kind=_kind(r)),
    lambda r: Use("clip", norm=r.choice((0.01, 1e9))),
    lambda r: Use("scale_gradients", factor=0.5),
    lambda r: Use("sync", syncs=r.random() < 0.6),
    lambda r: Use("sum_copies", sums=r.random() < 0.6),
    lambda r: Use("reshard_after_forward", at=_which(r), frees=_flag(r), recurse=_flag(r)),
    lambda r: Use("reshard_after_backward", at=_which(r), frees=r.random() < 0.7),
    lambda r: Use("write_between", batch=_which(r), at=_which(r)),
    lambda r: Use("read", at=_which(r)),
    lambda r: Use("penalty", batch=_which(r)),
    lambda r: Use("hook", which=_which(r), does=r.choice(("double", "step", "count"))),
    lambda r: Use("replace", at=_which(r), what=r.choice(("layer", "parameter", "one more"))),
    lambda r: Use("prefetch", at=_which(r), ahead=(_which(r), _which(r)), backward=_flag(r)),
    lambda r: Use("mode", training=_flag(r)),
    lambda r: Use("unshard", at=_which(r), asynchronous=_flag(r)),
    lambda r: Use("reshard", at=_which(r)),
    lambda r: Use("freeze", which=_which(r), asks=_flag(r)),
    lambda r: Use("freeze_part", at=_which(r), asks=_flag(r)),
    lambda r: Use("write", which=_which(r), how=r.choice(WAYS)),
    lambda r: Use("drop_gradient", which=_which(r)),
    lambda r: Use("load", factor=0.9, assign=_flag(r)),
    lambda r: Use("copy"),
    lambda r: Use("given", batch=_which(r), factor=0.8, mode=r.choice(("train", "no_grad"))),
    lambda r: Use("second_derivative", batch=_which(r)),
)
WAYS = ("in place", "data in place", "data", "copy", "init", "foreach", "local")


def _use(random: Random) -> Use:
    return random.choice(MAKERS)(random)
