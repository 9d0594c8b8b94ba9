"""Catalogue of the metrics that a run may log, with unit and meaning. The log refuses other keys.

`python -m megatron_async_rl.metrics.catalogue > docs/metrics.md` writes the page of metrics.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

MetricKind = Literal["number", "total", "counts", "doubling counts", "per engine"]
"""Type of a metric's value. `number`: a float or an integer. `total`: a count that never decreases
until the process restarts. `counts`: a list of integers, one per bin; bin i counts the value i.
`doubling counts`: a list of integers, one per bin; bin i counts values from 2^i up to, but not
including, 2^(i + 1). `per engine`: a list of numbers, one per engine, starting with engine 0."""

Value = float | list[int] | list[float]
"""Value of a metric: a number, counts per bin, or a number per engine."""

OverSteps = Literal["mean", "sum", "largest", "first", "last"]
"""Rule that reduces the values of a batch's optimizer steps to one value. A batch has
objective.minibatches x objective.epochs steps."""

_EXPECTED: Mapping[MetricKind, str] = {
    "number": "a number",
    "total": "a number",
    "counts": "a list of integers",
    "doubling counts": "a list of integers",
    "per engine": "a list of numbers",
}


class MetricsError(Exception):
    """Error for a key, a value or a step that the log refuses."""


@dataclass(frozen=True)
class Metric:
    """Description of one metric. `steps`: rule for several optimizer steps, except for totals."""

    unit: str
    meaning: str
    kind: MetricKind = "number"
    steps: OverSteps = "mean"

    @property
    def over_steps(self) -> OverSteps:
        """Rule for several optimizer steps of a batch."""
        return "last" if self.kind == "total" else self.steps

    def check(self, name: str, value: object) -> Value:
        """Return `value` in plain Python types. Raises MetricsError, which names the metric, if the
        value does not match `kind`."""
        if self.kind in ("number", "total"):
            if isinstance(value, Real):
                return _plain(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            entry_type = Real if self.kind == "per engine" else Integral
            if all(isinstance(entry, entry_type) for entry in value):
                return [_plain(entry) for entry in value]
        raise MetricsError(
            f"metric {name!r}: expected {_EXPECTED[self.kind]}, got {type(value).__name__}:"
            f" {value!r}"
        )


def _plain(value: Real) -> float:
    return int(value) if isinstance(value, Integral) else float(value)


MU = "behaviour policy (the engine that sampled the tokens)"

GROUPS: Mapping[str, tuple[str, Mapping[str, Metric]]] = {
    "Reward": (
        "Statistics of this step's samples whose reward did not fail.",
        {
            "reward/mean": Metric("reward", "Mean reward of a sample."),
            "reward/std": Metric("reward", "Standard deviation over the samples."),
            "reward/errors": Metric(
                "samples", "Samples whose reward raised, timed out or was not finite."
            ),
            "reward/equal_groups": Metric(
                "share",
                "Share of groups whose samples all have the same reward, which gives no gradient;"
                " among the groups with several samples.",
            ),
            "reward/part/NAME": Metric(
                "reward",
                "Mean of the value NAME: a part of `rollout.reward.parts` before weighting, or a"
                " number that the environment measured, such as `tool_errors` or"
                " `unread_tool_calls` (the model's tool calls that vLLM's parser could not read).",
            ),
        },
    ),
    "Responses": (
        "Statistics of this step's samples.",
        {
            "response/length_mean": Metric("tokens", "Mean response length."),
            "response/length_max": Metric("tokens", "Longest response."),
            "response/truncated": Metric(
                "share", "Share of responses truncated at `rollout.sampling.max_tokens`."
            ),
            "response/mixed_versions": Metric(
                "share", "Share of responses sampled by more than one weight version."
            ),
            "response/repeated": Metric(
                "responses", "Responses that are equal to an earlier response of their group."
            ),
            "response/repeated_expected": Metric(
                "responses",
                "Expected value of `response/repeated` for independent samples, from their own"
                " log-probs. Many more repeated responses show that seeds are shared.",
            ),
            "response/after_end": Metric(
                "tokens",
                "Trained tokens behind the end-of-sequence or stop token of their response; 0 is"
                " expected.",
            ),
            "response/without_logprob": Metric(
                "tokens",
                "Trained tokens whose log-prob by the engine is missing, not finite or above 0; 0"
                " is expected.",
            ),
            "response/turns_mean": Metric(
                "turns",
                "Mean number of trained turns per sample, if samples have several turns.",
            ),
            "response/segments_mean": Metric(
                "segments",
                "Mean number of sequences per sample, if `rollout.environment.max_segments` permits"
                " several.",
            ),
            "response/environment_share": Metric(
                "share",
                "Share of response tokens that are not trained on, such as an environment's tokens,"
                " if samples have several turns.",
            ),
        },
    ),
    "Policy": (
        (
            "Quantities of the optimizer step. If a batch has several steps"
            " (`objective.minibatches`, `objective.epochs`), each value on this page is the mean"
            " over the steps, unless its row states another rule."
        ),
        {
            "policy/loss": Metric("loss", "The minimised loss of the whole batch."),
            "policy/grad_norm": Metric(
                "L2 norm",
                "Gradient norm over the whole model, after the controls and before clipping.",
            ),
            "policy/grad_anomaly": Metric(
                "factor",
                "Gradient norm before the controls, divided by its median over the last 50 steps."
                " Present only if this ratio is above 20 and the norm is above clip_grad."
                " `anomalies.jsonl` lists the causes.",
                steps="largest",
            ),
            "policy/lr": Metric("per step", "Learning rate of the scheduler."),
            "policy/lr_scale": Metric(
                "factor",
                "Factor that the gradient controls apply to this step's learning rate.",
            ),
            "policy/beta1": Metric("factor", "Decay rate of Adam's first moment in this step."),
            "policy/micro_batches": Metric(
                "micro-batches", "Number of micro-batches of one data-parallel rank.", steps="sum"
            ),
            "policy/computed_tokens": Metric(
                "tokens",
                "Tokens that a training pass of the policy computes, on all ranks: prompts,"
                " responses without their last tokens, and padding. A prefix that samples of a"
                " micro-batch share counts once.",
                steps="sum",
            ),
            "policy/padding_share": Metric(
                "share", "Share of padding tokens among all computed tokens."
            ),
            "policy/shared_share": Metric(
                "share",
                "Share of the samples' tokens that are not computed, because another sample of the"
                " group has them in its prefix (policy.prefix_sharing).",
            ),
            "policy/rerouted": Metric(
                "share",
                "Share of the replayed expert choices (one per computed token and layer) that the"
                " policy's router would have made differently (with policy.routing_replay).",
            ),
            "policy/skipped": Metric(
                "0 or 1",
                "1: the optimizer step was skipped (by a control, because the gradient was not"
                " finite, or because the batch was empty). Over several steps: the share of skipped"
                " steps.",
            ),
            "policy/nonfinite": Metric(
                "steps",
                "Number of steps skipped so far because the loss or the gradient was not finite."
                " After policy.max_nonfinite_steps consecutive ones the run fails.",
                "total",
            ),
            "policy/entropy": Metric(
                "nats per token",
                "Mean entropy of the policy's next-token distribution on response tokens.",
            ),
        },
    ),
    "Ratios": (
        f"Comparison of the trained policy before this step with the {MU}, on trained tokens.",
        {
            "ratio/ess": Metric(
                "samples", "Effective sample size (Σw)²/Σw² of the untruncated sequence weights."
            ),
            "ratio/ess_ratio": Metric(
                "share", "`ratio/ess` divided by the number of samples; 1 is on-policy."
            ),
            "ratio/kl_k1": Metric(
                "nats per token",
                "k1 estimate of the KL divergence from behaviour to policy: mean of -log w.",
            ),
            "ratio/kl_k2": Metric(
                "nats per token",
                "k2 estimate of the same divergence: mean of (log w)^2 / 2, never negative.",
            ),
            "ratio/kl_k3": Metric(
                "nats per token",
                "k3 estimate of the same divergence: mean of w - 1 - log w, never negative.",
            ),
            "ratio/kl_reference": Metric(
                "nats per token",
                "k3 estimate of the KL divergence from the policy to the reference.",
            ),
            "ratio/chi2": Metric("per token", "Chi-squared divergence: mean of w² - 1."),
            "ratio/logp_diff_mean": Metric("nats", "Mean |logp - logp_behavior| over tokens."),
            "ratio/logp_diff_max": Metric(
                "nats", "Largest |logp - logp_behavior| of a token.", steps="largest"
            ),
            "ratio/logp_diff_lag0_max": Metric(
                "nats",
                "Largest |logp - logp_behavior| of a token in responses sampled entirely by the"
                " trained version; only rounding is expected. Absent without such responses.",
                steps="first",
            ),
            "ratio/prox_diff_max": Metric(
                "nats",
                "Largest |logp_prox - logp_behavior| of a token, with `proximal: ewma` or"
                " `snapshot`. With `snapshot` and `rollout.in_flight: recompute`, only rounding is"
                " expected.",
            ),
        },
    ),
    "Loss terms": (
        (
            "Terms added to the objective's loss, multiplied by their factors. All are part of"
            " `policy/loss`."
        ),
        {
            "loss/kl": Metric("loss", "KL penalty to the reference policy."),
            "loss/entropy": Metric("loss", "Entropy bonus (negative)."),
            "loss/value": Metric("loss", "Squared error of the value head."),
            "value/explained_variance": Metric(
                "share",
                "1 - Var(returns - values) / Var(returns) over trained tokens, before the step: 1"
                " is perfect.",
            ),
        },
    ),
    "Clipping": (
        (
            "Share of trained tokens whose ratio the loss clipped, by the sign of the advantage."
            " Absent if no token has that sign."
        ),
        {
            "clip/positive": Metric(
                "share", "Share of clipped tokens among those with a positive advantage."
            ),
            "clip/negative": Metric(
                "share", "Share of clipped tokens among those with a negative advantage."
            ),
            "clip/rejected": Metric(
                "share", "Share of trained tokens that the corrections rejected."
            ),
            "clip/weight_mean": Metric(
                "factor", "Mean weight of a trained token after all corrections."
            ),
        },
    ),
    "Objective decisions": (
        "Quantities that a loss computes from the whole batch before the step. Each is present with"
        " the losses that it names.",
        {
            "own/NAME": Metric(
                "",
                "Number NAME that a method of your own logs"
                " ([adding a method](add_a_method.md#what-it-returns)).",
            ),
            "objective/second_moment": Metric(
                "nats²",
                "`m2po`: mean (log w)² over the candidate tokens, before masking or clipping.",
            ),
            "objective/log_ratio_cap": Metric(
                "nats",
                "`m2po`, mode cap: bound to which |log w| is clipped; the largest |log w| if no"
                " clipping is needed.",
            ),
            "objective/clip_low": Metric("ratio", "`bapo`: lower bound of the ratio in this step."),
            "objective/clip_high": Metric(
                "ratio", "`bapo`: upper bound of the ratio in this step."
            ),
            "objective/positive_share": Metric(
                "share",
                "`bapo`: share of the loss's magnitude from tokens with a positive advantage.",
            ),
            "objective/log_z": Metric(
                "nats",
                "`trajectory_balance`: mean estimate of the log partition function of a prompt.",
            ),
            "objective/value": Metric("reward", "`oapl`: mean optimal value of a prompt."),
        },
    ),
    "Measured baseline": (
        "Present with advantage `opob`, mode `exact`.",
        {
            "opob/baseline": Metric("reward", "Mean over samples of their group's baseline."),
            "opob/shift": Metric(
                "reward",
                "Mean over samples of |b - mean reward of the group|, where b is the baseline: the"
                " effect of the measured weights.",
            ),
        },
    ),
    "Gradient alignment control": (
        "Present if `controls` has `gac`, or `matched_norm`, which reports the decisions that gac"
        " would make.",
        {
            "gac/cosine": Metric(
                "cosine",
                "Cosine between this step's gradient and the previous one, over the whole model.",
            ),
            "gac/regime": Metric(
                "code",
                "Decision about the step: 0 kept, 1 projected, 2 skipped.",
                steps="largest",
            ),
            "gac/skips": Metric("steps", "Number of steps skipped so far in the run.", "total"),
            "gac/removed": Metric(
                "share",
                "Length of the component that the projection removed, relative to the gradient:"
                " |g - g'| / |g|.",
            ),
            "gac/c_low": Metric(
                "cosine", "Current threshold; absent until calibrated.", steps="last"
            ),
            "gac/calibrated": Metric(
                "0 or 1",
                "1: the threshold was calibrated on the run's own fresh data (with `calibrate`"
                " only).",
                steps="last",
            ),
            "gac/to_zero": Metric(
                "0 or 1",
                "1: the gradient was parallel to the previous one within rounding, so the"
                " projection removed the whole aligned component, regardless of `target`.",
            ),
            "gac/kept": Metric("steps", "Number of steps kept so far in the run.", "total"),
            "gac/projected": Metric(
                "steps", "Number of steps projected so far in the run.", "total"
            ),
            "gac/cosine_kept": Metric(
                "cosine", "Mean cosine so far over the kept steps.", steps="last"
            ),
            "gac/cosine_projected": Metric(
                "cosine", "Mean cosine so far over the projected steps.", steps="last"
            ),
            "gac/cosine_skipped": Metric(
                "cosine", "Mean cosine so far over the skipped steps.", steps="last"
            ),
        },
    ),
    "Other controls": (
        (
            "Each is present if `controls` has the control that its key names. `update/norm` is"
            " present with `matched_lr` and with `policy.optimizer.log_update_norm`."
        ),
        {
            "update/norm": Metric(
                "L2 norm",
                "Norm of the optimizer's update, without weight decay; 0 if the step was skipped.",
            ),
            "matched_norm/scale": Metric(
                "factor",
                "Factor applied to the clipped gradient: |g'| / |g| of the projection that gac"
                " would make.",
            ),
            "matched_lr/scale": Metric(
                "factor",
                "Factor applied to the learning rate so that the mean norm of the update matches"
                " the target.",
            ),
            "momentum/cosine": Metric(
                "cosine",
                "Cosine between the gradient and Adam's first moment, or between the gradient and"
                " the negative last update.",
            ),
            "displacement/cosine": Metric(
                "cosine",
                "Cosine between the coming update and the displacement from the weights that"
                " sampled its batch.",
            ),
            "displacement/removed": Metric(
                "share",
                "Length of the component removed from the update, relative to the update:"
                " |u - u'| / |u|.",
            ),
            "ess_lr/scale": Metric(
                "factor",
                "Factor applied to the learning rate, computed from the effective sample size.",
            ),
            "ess_lr/ess_ratio": Metric(
                "share",
                "Effective sample size of the control's weights, divided by the number of samples.",
            ),
            "ess_lr/reference_ratio": Metric(
                "share",
                "Value of `ess_lr/ess_ratio` at and above which the learning rate is not reduced.",
            ),
        },
    ),
    "Lag": (
        "Trained weight version minus the weight version that sampled the token.",
        {
            "lag/start_mean": Metric("versions", "Mean lag of the samples' first tokens."),
            "lag/start_max": Metric(
                "versions",
                "Largest lag of the samples' first tokens. The staleness law bounds this value.",
            ),
            "lag/mean": Metric("versions", "Mean lag of the response tokens."),
            "lag/max": Metric("versions", "Largest lag of the response tokens."),
            "lag/histogram": Metric(
                "tokens", "Number of response tokens per lag, from lag 0.", "counts"
            ),
            "staleness/drift": Metric(
                "L2 norm",
                "S·η·G of the planning rule (arXiv 2607.01083): `lag/start_max` times"
                " `update/norm`, which is η·G, times the number of optimizer steps of a batch. If"
                " every update had this norm, the policy would be at most this far from the policy"
                " that sampled the oldest sample.",
            ),
        },
    ),
    "Tokens": (
        "",
        {
            "tokens/generated": Metric(
                "tokens",
                "Number of response tokens that the training engines sampled for training since the"
                " last step, according to their reports. Includes tokens of aborted responses, but"
                " not an environment's tokens.",
            ),
            "tokens/trained": Metric(
                "tokens", "Number of response tokens with a loss in this step."
            ),
            "tokens/prompt": Metric("tokens", "Number of prompt tokens of this step's samples."),
        },
    ),
    "Time": (
        "Durations, measured on rank 0.",
        {
            "time/wait_batch_s": Metric("s", "Time spent waiting for the batch."),
            "time/distribute_s": Metric(
                "s",
                "Time to check the batch, divide it and send it to the ranks.",
            ),
            "time/train_s": Metric("s", "Forward, backward and optimizer steps."),
            "time/precompute_s": Metric(
                "s",
                "Part of `time/train_s`: computation of log-probs and other quantities of the whole"
                " batch before the step, if the objective needs them.",
                steps="sum",
            ),
            "time/forward_backward_s": Metric(
                "s",
                "Part of `time/train_s`: forward and backward passes, with the reduction of"
                " gradients.",
                steps="sum",
            ),
            "time/optimizer_s": Metric(
                "s", "Part of `time/train_s`: controls, clipping and the optimizer.", steps="sum"
            ),
            "time/publish_s": Metric(
                "s",
                "Publication of the new weights: waiting for space, digests and copies; with"
                " `weights.transport: cuda_ipc`, until the engines have loaded them.",
            ),
            "time/sleep_s": Metric(
                "s", "Colocated: time until every engine sleeps and has released its memory."
            ),
            "time/make_room_s": Metric(
                "s",
                "Colocated: time to restore the policy's training state from host memory, and to"
                " move it back after the step.",
            ),
            "time/step_s": Metric(
                "s",
                "Whole step from the request for the batch, without evaluation and checkpoint.",
            ),
        },
    ),
    "Weights": (
        (
            "Transfer of the newest version that an engine had loaded when rank 0 received the"
            " batch. Engines load while the previous batch trains, so two lines may report the same"
            " version."
        ),
        {
            "weights/publish_s": Metric(
                "s", "Time from the first bucket to the last engine's confirmation."
            ),
            "weights/publish_bytes": Metric("bytes", "Number of bytes sent to each engine."),
            "weights/pause_s": Metric("s", "Longest pause of an engine for this version."),
            "weights/relay_s": Metric(
                "s",
                "Time until the slowest receiver had the complete, verified version (with"
                " `weights.transport: relay` or `collective`). A receiver is another machine, or"
                " the memory of an engine.",
            ),
            "weights/relay_bytes": Metric(
                "bytes",
                "Number of bytes that all receivers got for this version, including repeated"
                " transfers.",
            ),
        },
    ),
    "Evaluation": (
        (
            "Results of the last held-out evaluation that ended since the last step, if any."
            " TensorBoard shows each result at the evaluated version. `RUN/eval.jsonl` contains"
            " every evaluation, with the result of each prompt if responses were sampled."
        ),
        {
            "eval/mean": Metric("reward", "Mean over prompts of their responses' mean reward."),
            "eval/loss": Metric(
                "nats per token",
                "Mean -log p of the held-out responses (with `loss: sft`) over the tokens that"
                " would be trained on, weighted by row. On the training data, this is `policy/loss`"
                " with `aggregation: token-mean`.",
            ),
            "eval/pass@k": Metric(
                "share",
                "Share of prompts for which at least one of k responses passes (unbiased estimate)."
                " One key for each k of `eval.pass_at`, such as `eval/pass@4`.",
            ),
            "eval/part/NAME": Metric(
                "reward",
                "Mean of the part NAME of `rollout.reward.parts` before weighting.",
            ),
            "eval/SET/mean": Metric(
                "reward",
                "`eval/mean` of the set SET, with `eval.sets`. Keys without a set name are for the"
                " first set.",
            ),
            "eval/SET/loss": Metric("nats per token", "`eval/loss` of the set SET."),
            "eval/SET/pass@k": Metric("share", "`eval/pass@k` of the set SET."),
            "eval/SET/part/NAME": Metric("reward", "`eval/part/NAME` of the set SET."),
            "eval/SET/truncated": Metric("share", "`eval/truncated` of the set SET."),
            "eval/version": Metric("version", "Version of the evaluated weights."),
            "eval/truncated": Metric(
                "share", "Share of responses truncated at `rollout.sampling.max_tokens`."
            ),
            "eval/seconds": Metric(
                "s",
                "Time from the first request to the last response, or time to compute the loss of"
                " all held-out responses.",
            ),
        },
    ),
    "Flow": (
        "State at the end of the step. Totals count from the start or resume of the run.",
        {
            "flow/in_flight": Metric(
                "responses", "Unfinished responses that were sent to an engine."
            ),
            "flow/waiting": Metric(
                "responses", "Admitted responses that were not yet sent to an engine."
            ),
            "flow/buffer": Metric("groups", "Complete groups that have not been trained on yet."),
            "flow/admitted": Metric(
                "groups",
                "Groups admitted, including groups that a resume restored.",
                "total",
            ),
            "flow/consumed": Metric("groups", "Groups trained on.", "total"),
            "flow/parts": Metric(
                "parts",
                "Parts in which the batch arrived and entered the gradient, with `flow.stream:"
                " groups`.",
            ),
            "flow/dropped_equal": Metric(
                "groups", "Groups dropped by `flow.dynamic_sampling`.", "total"
            ),
            "flow/dropped_late": Metric("groups", "Groups dropped by `flow.late: drop`.", "total"),
            "flow/dropped_failed": Metric(
                "groups",
                "Groups dropped because one of their requests crashed engines repeatedly, the last"
                " time as the only request on its engine.",
                "total",
            ),
            "flow/aborted": Metric(
                "responses",
                "Responses aborted on an engine that left, and continued on another engine.",
                "total",
            ),
            "flow/replayed": Metric(
                "responses", "Responses from the `replay` store that were trained on.", "total"
            ),
        },
    ),
    "Engines": (
        (
            "State when rank 0 received the batch, or statistics since it received the previous"
            " batch. The source is the engines' reports, which arrive at least once a second. Lists"
            " have one number per engine, starting with engine 0."
        ),
        {
            "engine/busy_share": Metric(
                "share",
                "Share of the time in which an engine sampled (at least one response, not paused),"
                " averaged over the engines.",
            ),
            "engine/busy_shares": Metric(
                "share", "`engine/busy_share` of each engine.", "per engine"
            ),
            "engine/tokens": Metric(
                "tokens",
                "Number of response tokens that each engine sampled, for training and evaluation.",
                "per engine",
            ),
            "engine/in_flight": Metric(
                "responses", "Number of unfinished responses on each engine.", "per engine"
            ),
            "engine/versions": Metric(
                "version",
                "Weight version that each engine samples with; -1 for an engine that is gone.",
                "per engine",
            ),
            "engine/alive": Metric("engines", "Number of engines that accept requests."),
            "engine/restarts": Metric(
                "restarts",
                "Number of engine restarts since the start or resume of the run.",
                "total",
            ),
        },
    ),
    "Dropped against trained": (
        (
            "Comparison of this step's samples with the finished responses of groups dropped since"
            " the last step, if any. It shows, for example, that dropping late groups drops mainly"
            " long responses."
        ),
        {
            "trained/length_histogram": Metric(
                "responses",
                "Trained responses by length in tokens: 1, 2 to 3, 4 to 7, 8 to 15, ...",
                "doubling counts",
            ),
            "dropped/length_histogram": Metric(
                "responses", "Dropped responses by length, with the same bins.", "doubling counts"
            ),
            "dropped/responses": Metric("responses", "Number of dropped responses."),
            "dropped/length_mean": Metric("tokens", "Mean length of the dropped responses."),
            "dropped/reward_mean": Metric(
                "reward", "Mean reward of the dropped responses whose reward did not fail."
            ),
        },
    ),
}

METRICS: Mapping[str, Metric] = {
    name: key for _, keys in GROUPS.values() for name, key in keys.items()
}


def find_metric(name: str) -> Metric | None:
    """Return the metric of the key `name`; None for an unknown key. In a key, a number replaces the
    k of `@k`, the name of a held-out set replaces SET, and the name of a reward part, or of a
    number of a user's method, replaces NAME."""
    name = re.sub(r"@[1-9]\d*$", "@k", name)
    named = re.sub(r"(^reward/|^eval/|^eval/[^/]+/)part/[^/]+$", r"\1part/NAME", name)
    named = re.sub(r"^eval/(?!part/)[^/]+/", "eval/SET/", named)
    named = re.sub(r"^own/[\w.-]+$", "own/NAME", named)
    return METRICS.get(name) or METRICS.get(named)


HEADER = """# Metrics

`RUN/metrics.jsonl` has one JSON object per batch. A batch is one optimizer step, or several with
`objective.minibatches` or `objective.epochs`. TensorBoard shows the same keys (`RUN/tensorboard`),
and `mar report RUN` plots the main ones. With `observe.prometheus_port`, Prometheus can scrape the
newest line: `lag/start_max` is the gauge `mar_lag_start_max`, a list is a gauge with a label
(`engine` or `bin`), and a total, such as `flow/consumed`, is a counter (`mar_flow_consumed_total`).
Prometheus serves the newest `eval/*` until the next evaluation.
`python -m megatron_async_rl.metrics.catalogue > docs/metrics.md` writes this page.

Every line has:

| key | unit | meaning |
| --- | --- | --- |
| `step` | steps | Number of batches trained on, including this one; 1 in the first line. |
| `version` | | Weight version that this step produced, from the previous version. |
| `time` | Unix seconds | Time of writing, after the step and any evaluation that it waited for. |
| `weights` | | Digest, in hexadecimal, of the weights after this step ([replay](replay.md)). |
| `checksum` | | BLAKE3 digest (16 bytes) of the line without this key, to detect damage. |

A line omits the keys that do not apply to its step (the reward in a supervised run, the cosine in
the first step). A value that is not finite is the string `"nan"`, `"inf"` or `"-inf"`, because JSON
has no such numbers. A run never has two lines for one step: a resume moves the lines after its
checkpoint to `RUN/metrics.cut.jsonl`.
"""


def _several(key: Metric) -> str:
    """Return a sentence with a metric's rule for several optimizer steps; empty for the mean."""
    return {
        "sum": " Over several steps: the sum.",
        "largest": " Over several steps: the largest value.",
        "first": " Over several steps: the first value.",
        "last": " Over several steps: the last value.",
    }.get(key.steps, "")


def page() -> str:
    """Return the content of docs/metrics.md."""
    parts = [HEADER]
    for title, (about, keys) in GROUPS.items():
        parts.append(f"## {title}\n")
        if about:
            about = textwrap.fill(about, 100, break_long_words=False, break_on_hyphens=False)
            parts.append(f"{about}\n")
        rows = "\n".join(
            f"| `{name}` | {key.unit} | {key.meaning.replace('|', chr(92) + '|')}{_several(key)} |"
            for name, key in keys.items()
        )
        parts.append(f"| key | unit | meaning |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.buffer.write(page().encode("utf-8"))
