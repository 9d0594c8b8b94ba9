"""What vLLM says of one response, taken only when it accounts for every token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.outputs import CompletionOutput


def token_versions(completion: CompletionOutput) -> NDArray[np.int32]:
    """Weight version of each response token. Raises RuntimeError when vLLM's spans leave a token without a numbered version."""
    length = len(completion.token_ids)
    versions = np.full(length, -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        if not span.version.isdecimal():
            raise RuntimeError(f"tokens {span.start} to {span.end} carry weight version {span.version!r}, which is not a number")
        versions[span.start : span.end] = int(span.version)
    if np.any(versions < 0):
        without = np.flatnonzero(versions < 0).tolist()
        raise RuntimeError(f"tokens {without} of {length} carry no weight version: {completion.weight_versions}")
    return versions


def sampled_logprobs(completion: CompletionOutput) -> NDArray[np.float32]:
    """Log-prob of each response token, in nats. Raises RuntimeError when the engine did not report exactly one for each."""
    flat: Any = completion.logprobs
    if flat is None or flat.token_ids != list(completion.token_ids):
        raise RuntimeError(f"the engine reported no log-probs of the {len(completion.token_ids)} tokens it sampled")
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not np.all(np.isfinite(logprobs)):
        raise RuntimeError(f"the engine reported log-probs that are not finite: {logprobs.tolist()}")
    return logprobs
