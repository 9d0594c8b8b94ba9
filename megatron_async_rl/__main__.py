"""Entry point of `python -m megatron_async_rl`, which is equivalent to `mar`."""

from megatron_async_rl.cli import main

main()
