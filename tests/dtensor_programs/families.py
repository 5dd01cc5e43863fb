"""The kinds of steps, and how often each comes."""

from __future__ import annotations

from collections.abc import Callable

from tests.dtensor_programs import choosing, computing, indexing, layers, pictures, reducing, solving, viewing
from tests.dtensor_programs.draw import Draw

Family = Callable[[Draw], object]

FAMILIES: dict[Family, int] = {
    **viewing.FAMILIES,
    **computing.FAMILIES,
    **indexing.FAMILIES,
    **reducing.FAMILIES,
    **choosing.FAMILIES,
    **layers.FAMILIES,
    **pictures.FAMILIES,
    **solving.FAMILIES,
}
