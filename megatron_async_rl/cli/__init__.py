"""The `mar` command; each of its commands calls one module.

Invariant: importing this package, and every command up to the point where it needs them, loads no
torch, Megatron-Core, vLLM or Ray.
"""

# Importing the commands registers them, in the order in which `mar --help` lists them.
from megatron_async_rl.cli import runs, views  # noqa: F401
from megatron_async_rl.cli.application import app, never_fail_to_print

__all__ = ["app", "main"]


def main() -> None:
    """Console entry point."""
    never_fail_to_print()
    app()
