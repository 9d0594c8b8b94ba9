"""Tools of tests: the public functions of this module."""

from math import gcd  # noqa: F401 - not a tool, because another module defines it


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return _plus(a, b)


def _plus(a: int, b: int) -> int:
    return a + b
