"""Rows of `mar verify CONFIG --numerics`, from the samples of each version.

    weights                    digest of each engine's memory = digest of the trainer
    log-probs                  trainer against engine, by engine and context depth
    log-probs after an update  the same under changed weights, on the data's own prompts
    prefix cache               the same on prompts longer than a block of the cache
    sampling distribution      sampled tokens follow the trainer's distribution
    seeds                      responses repeat no more often than their probabilities explain
    tokens                     end of responses, log-probs and versions of trained tokens
    gradients                  every trainable parameter has one

The bound of a log-prob is measured: FACTOR times the effect of one more rounding per layer on the
same tokens (policy/canary_scores.py), plus the rounding of the log-prob itself.

Two statistics decide about the distribution. The first tokens behind each prompt are compared with
the trainer's whole distribution (chi-squared). On all tokens, the probability p(y) that the trainer
gives to a sampled token is compared with its expectation sum_v p(v)^2; the differences form a
martingale, so their sum over its root of summed squares is close to a standard normal number.
Where one token is likely, the others have most of the variance and may be missing in the sample. So
the variance of tokens with s = sum_v p(v)^2 above CERTAIN is at least the sum of its bounds
s sqrt(s) (1 - sqrt(s)), of a number between 0 and max p <= sqrt(s) with mean s.
Both fail at a probability of 1e-6, and the seed of the run makes them deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_async_rl.config.problem import number_of
from megatron_async_rl.metrics.load_log import WeightLoad
from megatron_async_rl.samples.bookkeeping import (
    SURPRISE,
    Repetitions,
    SampledTokens,
    repetitions,
    trained_after_end,
    without_logprob,
)
from megatron_async_rl.verify.canary_samples import CanarySamples
from megatron_async_rl.verify.scorecard import ScorecardRow, absent, row

FACTOR = 6.0
"""Largest difference of two implementations, in effects of one rounding per layer. A layer rounds
about ten times on each side, and independent roundings add up like sqrt(20) = 4.5 of them; 0.7 to
2.0 were measured (transformers and vLLM against Megatron, float32 and bfloat16)."""
LOGPROB_ROUNDOFF = 4 * 2.0**-24
"""Relative error of a float32 log-prob: a few roundings of its sums."""
NORMAL_LIMIT = 4.9
"""Two-sided limit of a standard normal number at a probability of SURPRISE."""
CERTAIN = 0.5
"""Expected probability of a sampled token above which a sample shows too little of the variance."""
FEWEST = 5.0
"""Smallest expected count of a bin of the chi-squared test; rarer tokens share one bin."""

UPDATED = ("log-probs after an update", "prefix cache")
"""Rows of the second version."""
SAME_SETTINGS = (
    "compare rollout.sampling with the engines' logs; if only one engine differs, look for"
    " differences in rollout.vllm, the software and the devices of its machine"
)


def weights_row(
    loads: Sequence[WeightLoad], versions: Sequence[CanarySamples], mismatch: str, carrier: str
) -> ScorecardRow:
    """Return the row of the digests. loads: of every engine. mismatch: the error of a load, else
    empty."""
    name, bound = "weights", "equal digests in every engine"
    remedy = (
        f"another tensor arrived than was sent: run again with another weights.transport than"
        f" {carrier}, and report the tensor, the layout and the versions of the libraries"
    )
    expected = {one.version: one.digest for one in versions}
    compared = [one for one in loads if one.version in expected]
    wrong = [
        f"version {one.version}: engine {one.engine} has {one.digest}, the trainer"
        f" {expected[one.version]}"
        for one in compared
        if one.digest != expected[one.version]
    ]
    if mismatch:
        wrong.insert(0, mismatch)
    wrong += [
        f"version {one.version}: engine {engine} has not loaded it"
        for one in versions
        for engine in one.known_engines
        if not any(load.engine == engine and load.version == one.version for load in compared)
    ]
    if not compared and not wrong:
        return absent(name, "no version was loaded", bound, remedy)
    tensors = max((one.tensors for one in compared), default=0)
    engines = number_of("engine", len({one.engine for one in compared}))
    value = (
        f"{number_of('version', len(expected))}, {engines}, {tensors} tensors by {carrier}"
        if not wrong
        else number_of("difference", len(wrong))
    )
    return row(name, value, bound, not wrong, remedy, wrong)


def logprob_row(
    name: str, samples: CanarySamples, chosen: NDArray[np.bool_], remedy: str
) -> ScorecardRow:
    """Return the row of the log-probs of the `chosen` tokens, [N]."""
    chosen = chosen & samples.trained
    if not chosen.any():
        return absent(name, "no token was sampled", "", remedy)
    difference = np.abs(samples.engine.astype(np.float64) - samples.trainer)
    rounding = np.abs(samples.rounded.astype(np.float64) - samples.trainer)
    own = LOGPROB_ROUNDOFF * np.maximum(np.abs(samples.trainer), 1.0)
    details: list[str] = []
    worst, largest = 0.0, (0.0, 0.0)
    overall = float(rounding[chosen].mean())
    for engine, depth, tokens in _cells(samples, chosen):
        # A bucket of few tokens has a noisy mean, so that of all tokens counts, too.
        mean_bound = FACTOR * max(float(rounding[tokens].mean()), overall)
        mean_bound += float(own[tokens].mean())
        largest_bound = FACTOR * float(rounding[chosen].max()) + float(own[tokens].max())
        mean, maximum = float(difference[tokens].mean()), float(difference[tokens].max())
        used = max(mean / mean_bound, maximum / largest_bound)
        # Negated comparisons, because a difference that is not a number must fail.
        if not used <= worst:
            worst, largest = used, (mean, mean_bound)
        if not used <= 1.0:
            details.append(
                f"engine {engine}, depth {depth} to {2 * depth - 1}: mean |difference| {mean:.2g}"
                f" (bound {mean_bound:.2g}), largest {maximum:.2g} (bound {largest_bound:.2g}),"
                f" {int(tokens.sum())} tokens"
            )
    silent = sorted(set(samples.known_engines) - set(samples.engines.tolist()))
    if silent and not details:
        listed = ", ".join(map(str, silent))
        return absent(name, f"engine {listed} sampled no response", "", remedy)
    value = f"mean |difference| {largest[0]:.2g} on {int(chosen.sum())} tokens"
    bound = f"at most {largest[1]:.2g} ({FACTOR:g} roundings per layer)"
    return row(name, value, bound, not details, remedy, details)


def _cells(
    samples: CanarySamples, chosen: NDArray[np.bool_]
) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Yield (engine, depth, tokens) for each engine and each bucket of depths from `depth` to
    2 depth - 1."""
    engines = samples.engines[samples.rows]
    exponents = np.log2(np.maximum(samples.depth, 1)).astype(np.int64)
    for engine in np.unique(engines[chosen]).tolist():
        for exponent in np.unique(exponents[chosen & (engines == engine)]).tolist():
            yield engine, 2**exponent, chosen & (engines == engine) & (exponents == exponent)


def of_another_distribution(name: str, renormalised: Sequence[str]) -> ScorecardRow:
    """Return the row of log-probs that the two sides compute for different distributions."""
    why = f"with {', '.join(renormalised)} the engines' log-probs are of another distribution"
    return absent(name, why, "", "see the row `sampling distribution`")


def initial_row(samples: CanarySamples) -> ScorecardRow:
    """Return the row of the log-probs under the model's own weights."""
    remedy = (
        "trainer and engines compute different probabilities with equal weights. If all depths"
        " differ, compare temperature, penalties and dtype; if the difference grows with depth,"
        " positions, RoPE settings and the attention window; if one engine differs, its software"
        " and device"
    )
    return logprob_row("log-probs", samples, samples.trained, remedy)


def updated_rows(
    first: CanarySamples, second: CanarySamples, prompts: int, long_prompt: int
) -> Iterator[ScorecardRow]:
    """Yield the rows of the log-probs under changed weights. long_prompt: length of lengthened
    prompts; 0 for none."""
    remedies = (
        "an engine samples with other weights than it loaded, such as copies in fused layers or"
        " captured graphs: compare rollout.vllm with its defaults, and on GPUs set"
        " rollout.vllm.enforce_eager: true",
        "keys and values of earlier weights were used: each update must reset the prefix cache, or"
        " salt it by version; set rollout.in_flight: recompute, with which each update clears it",
    )
    long = second.lengthened(prompts)[second.rows]
    if not long_prompt:
        long = np.zeros_like(long)
    assert first.first is not None
    moved = float(np.abs(first.first.moved).mean())
    rounding = FACTOR * float(np.abs(second.rounded - second.trainer)[second.trained].mean())
    for name, remedy, chosen in zip(UPDATED, remedies, (~long, long), strict=True):
        if name == UPDATED[1] and not long.any():
            why = "no canary prompt is longer than a block of the cache"
            fix = (
                "raise rollout.max_context and policy.tokens_per_micro_batch, or remove"
                " rollout.vllm.block_size"
            )
            yield absent(name, why, "", fix)
        # Otherwise a stale engine would look like rounding.
        elif moved <= 2 * rounding:
            why = f"the new weights change log-probs by {moved:.2g}, no more than rounding"
            yield absent(name, why, f"more than {2 * rounding:.2g}", remedy)
        else:
            yield logprob_row(name, second, chosen, remedy)


def sampling_row(
    samples: CanarySamples, renormalised: Sequence[str], repeated: Repetitions
) -> ScorecardRow:
    """Return the row of the sampling distribution. renormalised: settings of the engines' sampling
    that the trainer's distribution does not have."""
    name, bound = "sampling distribution", f"probability at least {SURPRISE:g}"
    if renormalised:
        remedy = f"set {', '.join(one.partition(':')[0] for one in renormalised)} to the default"
        what = f"the engines sample with {', '.join(renormalised)}, which the trainer ignores"
        return row(name, "another distribution", bound, False, remedy, [what])
    if repeated.surprising:
        why = "responses are not independent, see the row `seeds`"
        return absent(name, why, bound, "fix the seeds, then check again")
    assert samples.first is not None
    statistic, freedom = chi_squared(samples, samples.first.first_token_logprobs)
    z = probability_score(samples)
    chance = chi_squared_tail(statistic, freedom)
    details = []
    if chance < SURPRISE:
        details.append(
            f"first tokens: chi-squared {statistic:.1f} with {freedom} degrees of freedom,"
            f" probability {chance:.1g}"
        )
    if abs(z) > NORMAL_LIMIT:
        likely = "more" if z > 0 else "less"
        details.append(
            f"all tokens: sampled tokens are {likely} likely than in samples of the trainer's"
            f" distribution, by {abs(z):.1f} standard deviations"
        )
    remedy = "the engines draw from another distribution than they report: " + SAME_SETTINGS
    value = f"chi-squared {statistic:.1f} with {freedom} degrees of freedom, score {z:+.1f}"
    return row(name, value, bound, not details, remedy, details)


def chi_squared(samples: CanarySamples, logp: NDArray[np.float32]) -> tuple[float, int]:
    """Return the statistic of the first response tokens and its degrees of freedom. logp: [G, V],
    of the whole vocabulary behind the prompt of each group, in the order of the groups."""
    statistic, freedom = 0.0, 0
    first = samples.response_ids[samples.starts]
    # A first token that an environment wrote was not sampled.
    sampled = samples.trained[samples.starts]
    for number, group in enumerate(np.unique(samples.group)):
        drawn = first[(samples.group == group) & sampled]
        chances = np.exp(logp[number].astype(np.float64))
        expected = len(drawn) * chances / chances.sum()
        counts = np.bincount(drawn, minlength=len(expected)).astype(np.float64)
        bins = _bins(expected)
        found = np.bincount(bins, counts)
        wanted = np.bincount(bins, expected)
        if len(found) > 1:
            statistic += float(((found - wanted) ** 2 / wanted).sum())
            freedom += len(found) - 1
    return statistic, freedom


def _bins(expected: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each token, [V]: tokens in the order of their expected counts, in bins of
    at least FEWEST."""
    # By expectation alone, because bins chosen by counts would bias the statistic.
    order = np.argsort(-expected)
    bins = np.zeros(len(expected), dtype=np.int64)
    number, filled = 0, 0.0
    left = float(expected.sum())
    for token in order.tolist():
        bins[token] = number
        filled += expected[token]
        left -= expected[token]
        # The last bin takes the rest, which may be too little for a bin of its own.
        if filled >= FEWEST and left >= FEWEST:
            number, filled = number + 1, 0.0
    return bins


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """Return the probability of a larger statistic, by the cube root of Wilson and Hilferty; 1
    without a degree of freedom."""
    if not freedom:
        return 1.0
    spread = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def probability_score(samples: CanarySamples) -> float:
    """Return the sum of p(y) - sum_v p(v)^2 over sampled tokens, over its standard deviation; 0
    without any."""
    chosen = samples.trained
    chances = np.exp(samples.trainer[chosen].astype(np.float64))
    expected = samples.sum_p_squared[chosen].astype(np.float64)
    differences = chances - expected
    certain = expected > CERTAIN
    # Rounding may exceed 1.
    root = np.sqrt(np.minimum(expected[certain], 1.0))
    squares = differences**2
    minimum = max(float(squares[certain].sum()), float((root**3 * (1.0 - root)).sum()))
    spread = math.sqrt(float(squares[~certain].sum()) + minimum)
    return float(differences.sum()) / spread if spread else 0.0


def seeds_row(samples: CanarySamples, repeated: Repetitions) -> ScorecardRow:
    """Return the row of repeated responses."""
    remedy = (
        "different requests draw the same random numbers: give every response its own seed, on"
        " every engine"
    )
    value = f"{repeated.count} repeated responses of {len(samples.length)}"
    # The smallest surprising count is the first failure.
    bound = f"about {repeated.expected:.4g} expected"
    details = _pairs(samples) if repeated.surprising else []
    return row("seeds", value, bound, not repeated.surprising, remedy, details)


def _pairs(samples: CanarySamples) -> list[str]:
    """Return the first repetitions, with their engines."""
    found: list[str] = []
    known: dict[tuple[int, bytes], int] = {}
    for number, (start, length) in enumerate(zip(samples.starts, samples.length, strict=True)):
        response = samples.response_ids[start : start + length].tobytes()
        before = known.setdefault((int(samples.group[number]), response), number)
        if before != number:
            one, other = (
                f"{samples.id[place]} (engine {samples.engines[place]})"
                for place in (before, number)
            )
            found.append(f"{other} has the response of {one}")
    return found


def tokens_row(versions: Sequence[CanarySamples], ends: Collection[int]) -> ScorecardRow:
    """Return the row of the bookkeeping of tokens. ends: tokens that end a response."""
    details: list[str] = []
    for samples in versions:
        tokens = sampled_tokens(samples)
        other = (samples.versions != samples.version) & samples.trained
        counts: Mapping[str, NDArray[np.int64]] = {
            "trained tokens after the end of the response": trained_after_end(tokens, ends),
            "trained tokens without a log-prob": without_logprob(tokens),
            "tokens of another version": np.bincount(
                samples.rows[other], minlength=len(samples.length)
            ),
        }
        for what, per_sample in counts.items():
            for place in np.flatnonzero(per_sample).tolist():
                details.append(
                    f"version {samples.version}: {samples.id[place]} has {per_sample[place]} {what}"
                )
    total = sum(int(one.trained.sum()) for one in versions)
    remedy = (
        "the loss contains tokens that the policy did not choose: check stop tokens, the loss mask"
        " of rollout.environment, and the library versions"
    )
    value = f"{number_of('faulty sample', len(details))}, {total} tokens"
    return row("tokens", value, "0 faulty samples", not details, remedy, details)


def gradients_row(samples: CanarySamples) -> ScorecardRow:
    """Return the row of the gradients."""
    assert samples.first is not None
    names, trainable = samples.first.without_gradient, samples.first.trainable
    remedy = (
        "these parameters are not learned: look for a detached tensor, a module that the forward"
        " pass does not use, or experts that no token reached"
    )
    value = f"{len(names)} of {trainable} parameters without a gradient"
    return row("gradients", value, "0 parameters", not names, remedy, names)


def repeated_responses(samples: CanarySamples) -> Repetitions:
    return repetitions(sampled_tokens(samples))


def sampled_tokens(samples: CanarySamples) -> SampledTokens:
    """Return the tokens as samples/bookkeeping.py reads them."""
    return SampledTokens(
        response_ids=samples.response_ids,
        logp=samples.engine,
        trained=samples.trained,
        lengths=samples.length,
        group=samples.group.tolist(),
    )
