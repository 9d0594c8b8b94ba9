"""`python -m megatron_async_rl` is `mar`."""

from megatron_async_rl.cli import main

main()
