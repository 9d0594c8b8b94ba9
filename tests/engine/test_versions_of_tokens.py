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
    ("completed", "why"),
    [
        (completion(), r"no weight version for tokens \[0, 1, 2, 3\] of 4"),
        (completion(("3", 0, 1), ("4", 2, 4)), r"no weight version for tokens \[1\] of 4"),
        (completion(("default", 0, 4)), "'default' for tokens 0 to 4; versions must be numbers"),
    ],
    ids=["no spans", "a gap", "a label"],
)
def test_a_token_without_a_numbered_version_is_refused(
    completed: SimpleNamespace, why: str
) -> None:
    from megatron_async_rl.rollout.vllm.client import token_versions

    with pytest.raises(RuntimeError, match=why):
        token_versions(completed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flat", "why"),
    [
        (None, "of the 4 tokens that it sampled, but none"),
        (
            SimpleNamespace(token_ids=[0, 1, 2], logprobs=[-1.0] * 3),
            r"of the 4 tokens that it sampled, but those of tokens \[0, 1, 2\]",
        ),
        (
            SimpleNamespace(token_ids=[0, 1, 2, 9], logprobs=[-1.0] * 4),
            r"of the 4 tokens that it sampled, but those of tokens \[0, 1, 2, 9\]",
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
