"""A calculator as a tool. The model calls it as `[times(a=37,b=4)]`, which vLLM's tool parser
`pythonic` reads, and is answered with `148=`."""


def times(a: int, b: int) -> str:
    """Multiplies two whole numbers."""
    return f"{a * b}="
