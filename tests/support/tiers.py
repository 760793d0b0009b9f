"""What of a long list of parameters the default run tries: `-m thorough` tries the others."""

from collections.abc import Iterable

import pytest


def every(nth: int, values: Iterable) -> list:
    """The values for `parametrize`; all but every nth, from the first one on, marked as thorough."""
    return [pytest.param(x, marks=[pytest.mark.thorough] * bool(i % nth)) for i, x in enumerate(values)]
