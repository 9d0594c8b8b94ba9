"""Tools for tests. The tools of a module are its public functions."""

from math import gcd  # noqa: F401 - a function of another module, so it is not a tool


def add(a: int, b: int) -> int:
    """Adds."""
    return _plus(a, b)


def _plus(a: int, b: int) -> int:
    return a + b
