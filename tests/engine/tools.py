"""Tools of tests: the public functions of a module."""

from math import gcd  # noqa: F401 - another module's, so no tool


def add(a: int, b: int) -> int:
    """Adds."""
    return _plus(a, b)


def _plus(a: int, b: int) -> int:
    return a + b
