"""Plans the blocks in which the logits of a linear layer are made, so that they are never all in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from disttrain.kernels.cross_entropy.pieces import LossTerms

BLOCK_BYTES: Final = 1 << 30
"""Of a block of logits, at most, unless told otherwise."""

FEWEST_ROWS: Final = 512
"""With fewer, reading the matrix takes longer than multiplying by it."""


class Blocks(NamedTuple):
    """A block has `rows` tokens and `columns` classes; the last ones may have fewer."""

    num_rows: int
    num_columns: int
    """Of the largest part, where the classes are cut among ranks: all ranks have as many blocks."""
    rows: int
    columns: int

    @property
    def cuts_rows(self) -> bool:
        return self.rows < self.num_rows

    @property
    def cuts_columns(self) -> bool:
        return self.columns < self.num_columns

    def of_rows(self) -> Iterator[slice]:
        for begin in range(0, self.num_rows, self.rows):
            yield slice(begin, begin + self.rows)

    def of_columns(self, num_own: int) -> Iterator[slice]:
        """The slices of a part with `num_own` classes; the last may be empty."""
        for begin in range(0, max(1, self.num_columns), self.columns):
            yield slice(min(begin, num_own), min(begin + self.columns, num_own))


def plan_blocks(num_rows: int, num_columns: int, element_bytes: int, block_bytes: int) -> Blocks:
    """Whole rows where FEWEST_ROWS of them fit, since each cut of the classes makes all logits a second time."""
    fitting = block_bytes // max(1, num_columns * element_bytes)
    if fitting >= min(num_rows, FEWEST_ROWS):
        rows, columns = min(num_rows, fitting // 128 * 128 or fitting), num_columns
    else:
        rows = min(num_rows, FEWEST_ROWS)
        fitting = block_bytes // (rows * element_bytes)
        columns = min(num_columns, max(1, fitting // 128 * 128 or fitting))
    return Blocks(num_rows, num_columns, max(1, rows), max(1, columns))


def terms_of(terms: LossTerms, columns: slice) -> LossTerms:
    """The terms of a block of this rank's part."""
    return terms._replace(first_class=terms.first_class + columns.start)
