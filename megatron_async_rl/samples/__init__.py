"""Types of the data that flows. They carry data and check their own invariants, and do nothing
else."""

from megatron_async_rl.samples.types import FinishReason, Prompt, Sample

__all__ = ["FinishReason", "Prompt", "Sample"]
