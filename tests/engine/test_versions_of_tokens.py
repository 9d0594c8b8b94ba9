"""Reports of vLLM on a response are accepted only if they account for every token. No engine is
started here."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine


def completion(*spans: tuple[str, int, int], tokens: int = 4, **fields: object) -> SimpleNamespace:
    versions = [
        SimpleNamespace(version=version, start=start, end=end) for version, start, end in spans
    ]
    return SimpleNamespace(
        token_ids=list(range(tokens)), weight_versions=versions or None, **fields
    )


def test_spans_become_one_version_for_each_token() -> None:
    from megatron_async_rl.rollout.vllm.client import token_versions

    assert token_versions(completion(("3", 0, 1), ("5", 1, 4))).tolist() == [3, 5, 5, 5]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (completion(), r"tokens \[0, 1, 2, 3\] of 4 carry no weight version"),
        (completion(("3", 0, 1), ("4", 2, 4)), r"tokens \[1\] of 4 carry no weight version"),
        (completion(("default", 0, 4)), "'default', which is not a number"),
    ],
    ids=["no spans", "a gap", "a label"],
)
def test_a_token_without_a_numbered_version_is_refused(said: SimpleNamespace, why: str) -> None:
    from megatron_async_rl.rollout.vllm.client import token_versions

    with pytest.raises(RuntimeError, match=why):
        token_versions(said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flat", "why"),
    [
        (None, "no log-probs of the 4 tokens"),
        (SimpleNamespace(token_ids=[0, 1, 2], logprobs=[-1.0] * 3), "no log-probs of the 4 tokens"),
        (
            SimpleNamespace(token_ids=[0, 1, 2, 9], logprobs=[-1.0] * 4),
            "no log-probs of the 4 tokens",
        ),
        (
            SimpleNamespace(token_ids=[0, 1, 2, 3], logprobs=[-1.0, float("-inf"), -1.0, -1.0]),
            "not finite",
        ),
    ],
    ids=["none", "too few", "of another token", "impossible"],
)
def test_a_token_without_its_own_logprob_is_refused(flat: SimpleNamespace | None, why: str) -> None:
    from megatron_async_rl.rollout.vllm.client import sampled_logprobs

    with pytest.raises(RuntimeError, match=why):
        sampled_logprobs(completion(logprobs=flat))  # type: ignore[arg-type]
