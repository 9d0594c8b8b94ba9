"""Checks of the policy's settings, among themselves and with other sections; see rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async_rl.config.schema import Config


def lora_conflicts(config: Config) -> Iterator[str]:
    """Yield the reasons why adapters do not fit the run."""
    if config.policy.lora is None:
        return
    # The trainer sends merged weights in this precision, so engines must compute in it.
    if config.policy.lora.merge == "float32":
        if config.model.dtype == "float32":
            yield (
                "policy.lora.merge: float32 has no effect, because model.dtype is float32 already;"
                " remove it"
            )
        if config.rollout is not None and config.rollout.quantised:
            yield (
                "policy.lora.merge: float32 has engines compute in float32, and"
                f" rollout.vllm.quantization: {config.rollout.vllm['quantization']} quantises their"
                " weights from bfloat16; remove one of the two"
            )
    reference = config.objective.reference
    # With adapters, policy and reference share one copy of the base weights.
    if reference is not None and reference.path is not None:
        yield (
            "objective.reference.path names another model, and with policy.lora a rank holds whole"
            " weights of the base model only; remove the path (the reference is then model.path"
            " without adapters), or set policy.lora: null"
        )


def sharing_conflicts(config: Config) -> Iterator[str]:
    """Yield the reason why responses cannot share the prefix of their group."""
    policy = config.policy
    if policy.prefix_sharing == "always" and policy.not_shared:
        yield (
            f"policy.prefix_sharing: always shares no prefix {policy.not_shared}; change that, or"
            " set policy.prefix_sharing: auto"
        )
