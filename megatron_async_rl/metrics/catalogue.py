"""Every key a run may log, with its unit and meaning. A key that is not here is refused by the log.

`python -m megatron_async_rl.metrics.catalogue > docs/metrics.md` writes the page users read.
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
"""`number`: a float or an integer; `total`: a count that only grows until the process restarts;
`counts`: a list of integers, one per bin from 0; `doubling counts`: the same, bin i for values from
2^i up to, and not including, 2^(i + 1); `per engine`: a list of numbers, the first for engine 0."""

Value = float | list[int] | list[float]
"""A number, counts, or a number for each engine."""

OverSteps = Literal["mean", "sum", "largest", "first", "last"]
"""Number of a batch from those of its optimizer steps, where objective.minibatches x
objective.epochs make several."""

_EXPECTED: Mapping[MetricKind, str] = {
    "number": "a number",
    "total": "a number",
    "counts": "a list of integers",
    "doubling counts": "a list of integers",
    "per engine": "a list of numbers",
}


class MetricsError(Exception):
    """A key, a value or a step that the log cannot take."""


@dataclass(frozen=True)
class Metric:
    unit: str
    meaning: str
    kind: MetricKind = "number"
    steps: OverSteps = "mean"

    @property
    def over_steps(self) -> OverSteps:
        return "last" if self.kind == "total" else self.steps

    def check(self, name: str, value: object) -> Value:
        """`value` as plain Python. Raises MetricsError, naming the metric, for another kind."""
        if self.kind in ("number", "total"):
            if isinstance(value, Real):
                return _plain(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            of = Real if self.kind == "per engine" else Integral
            if all(isinstance(entry, of) for entry in value):
                return [_plain(entry) for entry in value]
        raise MetricsError(
            f"metric {name!r} is {_EXPECTED[self.kind]}, got {type(value).__name__}: {value!r}"
        )


def _plain(value: Real) -> float:
    return int(value) if isinstance(value, Integral) else float(value)


MU = "behaviour policy (the engine that sampled)"

GROUPS: Mapping[str, tuple[str, Mapping[str, Metric]]] = {
    "Reward": (
        "Over the samples of this step whose reward did not fail.",
        {
            "reward/mean": Metric("reward", "Mean reward of a sample."),
            "reward/std": Metric("reward", "Standard deviation over the samples."),
            "reward/errors": Metric(
                "samples", "Samples whose reward raised, timed out or was not finite."
            ),
            "reward/equal_groups": Metric(
                "share",
                "Share of the groups of several samples whose samples all have the same reward:"
                " they give no gradient.",
            ),
            "reward/part/NAME": Metric(
                "reward",
                "Mean of the value NAME: a part of `rollout.reward.parts` before weighting, or a"
                " number that the environment measured, such as `tool_errors` or"
                " `unread_tool_calls` (tool calls of the model that vLLM's parser could not read).",
            ),
        },
    ),
    "Responses": (
        "Over the samples of this step.",
        {
            "response/length_mean": Metric("tokens", "Mean response length."),
            "response/length_max": Metric("tokens", "Longest response."),
            "response/truncated": Metric(
                "share", "Share of the responses cut at `rollout.sampling.max_tokens`."
            ),
            "response/mixed_versions": Metric(
                "share", "Share of the responses sampled by more than one weight version."
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
                "Share of the response tokens that are not trained on, such as an environment's, if"
                " samples have several turns.",
            ),
        },
    ),
    "Policy": (
        (
            "The optimizer step. Where a batch makes several (`objective.minibatches`,"
            " `objective.epochs`), a number of this page is their mean, unless it is given with"
            " its own rule."
        ),
        {
            "policy/loss": Metric("loss", "The minimised objective, over the whole batch."),
            "policy/grad_norm": Metric(
                "L2 norm",
                "Gradient norm over the whole model, after the controls and before clipping.",
            ),
            "policy/grad_anomaly": Metric(
                "factor",
                "Gradient norm before the controls over the median of the last 50 steps; present"
                " only if it is above 20 and the norm is above clip_grad. `anomalies.jsonl` has the"
                " causes.",
                steps="largest",
            ),
            "policy/lr": Metric("per step", "Learning rate of the scheduler."),
            "policy/lr_scale": Metric(
                "factor",
                "Factor of the gradient controls on the learning rate of this step.",
            ),
            "policy/beta1": Metric("factor", "Decay of Adam's first moment in this step."),
            "policy/micro_batches": Metric(
                "micro-batches", "Number of micro-batches of one data-parallel rank.", steps="sum"
            ),
            "policy/padding_share": Metric("share", "Share of padding among all computed tokens."),
            "policy/rerouted": Metric(
                "share",
                "Share of the replayed choices of experts, one per token and layer, that the router"
                " would have made differently (with policy.routing_replay).",
            ),
            "policy/skipped": Metric(
                "0 or 1",
                "1: no optimizer step was taken (a control skipped it, the gradient was not finite,"
                " or the batch was empty). Over several steps: the share of skipped ones.",
            ),
            "policy/nonfinite": Metric(
                "steps",
                "Number of steps skipped so far because the loss or the gradient was not finite;"
                " policy.max_nonfinite_steps of them in a row end the run.",
                "total",
            ),
            "policy/entropy": Metric(
                "nats per token",
                "Mean entropy of the policy's next-token distribution on response tokens.",
            ),
        },
    ),
    "Ratios": (
        f"Comparisons of the trained policy before this step with the {MU}, on trained tokens.",
        {
            "ratio/ess": Metric(
                "samples", "Effective sample size (Σw)²/Σw² of the untruncated sequence weights."
            ),
            "ratio/ess_ratio": Metric(
                "share", "`ratio/ess` over the number of samples: 1 is on-policy."
            ),
            "ratio/kl_k1": Metric(
                "nats per token",
                "k1 estimate of the KL divergence from behaviour to policy: mean of -log w.",
            ),
            "ratio/kl_k2": Metric(
                "nats per token", "k2 estimate of the same: mean of (log w)^2 / 2, never negative."
            ),
            "ratio/kl_k3": Metric(
                "nats per token", "k3 estimate of the same: mean of w - 1 - log w, never negative."
            ),
            "ratio/kl_reference": Metric(
                "nats per token", "k3 estimate of the divergence from the policy to the reference."
            ),
            "ratio/chi2": Metric("per token", "Chi-squared divergence: mean of w² - 1."),
            "ratio/logp_diff_mean": Metric("nats", "Mean |logp - logp_behavior| over tokens."),
            "ratio/logp_diff_max": Metric(
                "nats", "Largest |logp - logp_behavior| of a token.", steps="largest"
            ),
            "ratio/logp_diff_lag0_max": Metric(
                "nats",
                "The same over responses sampled entirely by the trained version, where it should"
                " be rounding only. Absent without such responses.",
                steps="first",
            ),
            "ratio/prox_diff_max": Metric(
                "nats",
                "Largest |logp_prox - logp_behavior| of a token, with `proximal: ewma` or"
                " `snapshot`. With `snapshot` and `rollout.in_flight: recompute` it should be"
                " rounding only.",
            ),
        },
    ),
    "Loss terms": (
        (
            "Terms added to the objective's loss, each with its factor; all are part of"
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
            "Share of trained tokens whose ratio the loss clipped, by the sign of the advantage;"
            " absent without tokens of that sign."
        ),
        {
            "clip/positive": Metric("share", "Share among the tokens with a positive advantage."),
            "clip/negative": Metric("share", "Share among the tokens with a negative advantage."),
            "clip/rejected": Metric(
                "share", "Share of all trained tokens that corrections rejected."
            ),
            "clip/weight_mean": Metric(
                "factor", "Mean weight of a trained token after all corrections."
            ),
        },
    ),
    "Objective decisions": (
        ("Decisions of a loss from the whole batch before the step, present for the named losses."),
        {
            "objective/second_moment": Metric(
                "nats²", "`m2po`: mean (log w)² over the candidate tokens, before any is cut."
            ),
            "objective/log_ratio_cap": Metric(
                "nats",
                "`m2po`, mode cap: bound at which |log w| is clipped; the largest |log w| if no"
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
                "Mean over samples of |b - mean reward of the group|: the effect of the measured"
                " weights.",
            ),
        },
    ),
    "Gradient alignment control": (
        "Present when `controls` has `gac`, or `matched_norm`, which reports what gac would do.",
        {
            "gac/cosine": Metric(
                "cosine",
                "Cosine between this step's gradient and the previous one, over the whole model.",
            ),
            "gac/regime": Metric(
                "code", "Decision: 0 kept, 1 projected, 2 skipped.", steps="largest"
            ),
            "gac/skips": Metric("steps", "Number of steps skipped so far in the run.", "total"),
            "gac/removed": Metric(
                "share",
                "Length of the part that projection removed, over the gradient's own length: |g -"
                " g'| / |g|.",
            ),
            "gac/c_low": Metric(
                "cosine", "Threshold in force; absent until calibrated.", steps="last"
            ),
            "gac/calibrated": Metric(
                "0 or 1",
                "1: the threshold comes from the run's own fresh data (with `calibrate` only).",
                steps="last",
            ),
            "gac/to_zero": Metric(
                "0 or 1",
                "1: the gradient was parallel to its predecessor within rounding, so that the"
                " aligned component was removed whatever the `target`.",
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
            "Each is present if `controls` has the control in its name. `update/norm` is present"
            " with `matched_lr` and with `policy.optimizer.log_update_norm`."
        ),
        {
            "update/norm": Metric(
                "L2 norm",
                "Length of the optimizer's update, without weight decay; 0 without a step.",
            ),
            "matched_norm/scale": Metric(
                "factor",
                "Factor on the clipped gradient: |g'| / |g| of the projection that gac would make.",
            ),
            "matched_lr/scale": Metric(
                "factor",
                "Factor on the learning rate that makes the mean update as long as the target.",
            ),
            "momentum/cosine": Metric(
                "cosine",
                "Cosine between the gradient and Adam's first moment, or the negative last update.",
            ),
            "displacement/cosine": Metric(
                "cosine",
                "Cosine between the coming update and the displacement from the weights that"
                " sampled its batch.",
            ),
            "displacement/removed": Metric(
                "share",
                "Length of the part removed from the update, over the update's own length: |u - u'|"
                " / |u|.",
            ),
            "ess_lr/scale": Metric(
                "factor", "Factor on the learning rate from the effective sample size."
            ),
            "ess_lr/ess_ratio": Metric(
                "share",
                "Effective sample size of the control's weights over the number of samples.",
            ),
            "ess_lr/reference_ratio": Metric(
                "share", "`ess_lr/ess_ratio` at which the learning rate is not reduced."
            ),
        },
    ),
    "Lag": (
        "Weight version trained minus weight version that sampled.",
        {
            "lag/start_mean": Metric("versions", "Mean lag of the samples' first tokens."),
            "lag/start_max": Metric(
                "versions",
                "Largest lag of the samples' first tokens, which the staleness law bounds.",
            ),
            "lag/mean": Metric("versions", "Mean lag of the response tokens."),
            "lag/max": Metric("versions", "Largest lag of the response tokens."),
            "lag/histogram": Metric(
                "tokens", "Number of response tokens per lag, from lag 0.", "counts"
            ),
            "staleness/drift": Metric(
                "L2 norm",
                "S·η·G of the planning rule (arXiv 2607.01083): `lag/start_max` times"
                " `update/norm`, which is η·G, times the optimizer steps of a batch. It bounds the"
                " distance of the policy from the oldest sample's, if every update had been as long"
                " as this one.",
            ),
        },
    ),
    "Tokens": (
        "",
        {
            "tokens/generated": Metric(
                "tokens",
                "Response tokens that the training engines sampled for training since the last"
                " step, as far as reported; tokens of aborted responses count, an environment's do"
                " not.",
            ),
            "tokens/trained": Metric("tokens", "Response tokens with loss in this step."),
            "tokens/prompt": Metric("tokens", "Prompt tokens of this step's samples."),
        },
    ),
    "Time": (
        "Seconds on rank 0.",
        {
            "time/wait_batch_s": Metric("s", "Wait for the batch."),
            "time/train_s": Metric("s", "Forward, backward and optimizer steps."),
            "time/precompute_s": Metric(
                "s",
                "Part of `time/train_s`: log-probs and other numbers of the whole batch, if"
                " needed.",
                steps="sum",
            ),
            "time/forward_backward_s": Metric(
                "s", "Part of `time/train_s`: the micro-batches, gradients reduced.", steps="sum"
            ),
            "time/optimizer_s": Metric(
                "s", "Part of `time/train_s`: controls, clipping and the optimizer.", steps="sum"
            ),
            "time/publish_s": Metric(
                "s",
                "Publication of the new weights: waiting for their place, digests, copies; with"
                " `weights.transport: cuda_ipc`, until the engines have loaded them.",
            ),
            "time/sleep_s": Metric(
                "s", "Colocated: wait until every engine sleeps and has released its memory."
            ),
            "time/make_room_s": Metric(
                "s",
                "Colocated: time to restore the policy's training state from host memory, and to"
                " move it back after the step.",
            ),
            "time/step_s": Metric(
                "s",
                "The whole step from the request for the batch, without evaluation and checkpoint.",
            ),
        },
    ),
    "Weights": (
        (
            "The newest version that an engine had loaded when the batch was taken. Engines load"
            " while the batch before trains, so a version may be in two lines."
        ),
        {
            "weights/publish_s": Metric(
                "s", "Time from the first bucket to the last engine's answer."
            ),
            "weights/publish_bytes": Metric("bytes", "Bytes sent to each engine."),
            "weights/pause_s": Metric("s", "Longest pause of an engine."),
            "weights/relay_s": Metric(
                "s",
                "Time until the newest version was complete and verified on another machine, or in"
                " an engine's own memory, for the slowest of them (with `weights.transport: relay`"
                " or `collective`).",
            ),
            "weights/relay_bytes": Metric(
                "bytes", "Bytes that all of them received for it, repeated transfers included."
            ),
        },
    ),
    "Evaluation": (
        (
            "Results of the last held-out evaluation that ended since the last step, if any did."
            " TensorBoard shows each at the evaluated version. `RUN/eval.jsonl` has every"
            " evaluation, prompt by prompt if prompts were sampled."
        ),
        {
            "eval/mean": Metric("reward", "Mean over prompts of their responses' mean reward."),
            "eval/loss": Metric(
                "nats per token",
                "-log p of the held-out responses (with `loss: sft`) over the tokens that would be"
                " trained on, each row by its weight; on the training data it would be"
                " `policy/loss` with `aggregation: token-mean`.",
            ),
            "eval/pass@k": Metric(
                "share",
                "Share of the prompts for which at least one of k responses passes (unbiased"
                " estimate); one key for each k of `eval.pass_at`, such as `eval/pass@4`.",
            ),
            "eval/part/NAME": Metric(
                "reward",
                "Mean of the part NAME of `rollout.reward.parts` before weighting.",
            ),
            "eval/SET/mean": Metric(
                "reward",
                "`eval/mean` of the set SET, with `eval.sets`. Keys without a set are the first"
                " set's.",
            ),
            "eval/SET/loss": Metric("nats per token", "`eval/loss` of the set SET."),
            "eval/SET/pass@k": Metric("share", "`eval/pass@k` of the set SET."),
            "eval/SET/part/NAME": Metric("reward", "`eval/part/NAME` of the set SET."),
            "eval/SET/truncated": Metric("share", "`eval/truncated` of the set SET."),
            "eval/version": Metric("version", "Version of the evaluated weights."),
            "eval/truncated": Metric(
                "share", "Share of the responses cut at `rollout.sampling.max_tokens`."
            ),
            "eval/seconds": Metric(
                "s",
                "Time from the first request to the last response, or of the loss over all held-out"
                " responses.",
            ),
        },
    ),
    "Flow": (
        "State at the end of the step.",
        {
            "flow/in_flight": Metric(
                "responses", "Responses given to an engine and not yet finished."
            ),
            "flow/waiting": Metric(
                "responses", "Responses admitted and not yet given to an engine."
            ),
            "flow/buffer": Metric("groups", "Complete groups that wait to be trained on."),
            "flow/admitted": Metric(
                "groups",
                "Groups admitted since the run was started or resumed; groups that a resume"
                " restored count.",
                "total",
            ),
            "flow/consumed": Metric("groups", "Groups trained on since then.", "total"),
            "flow/dropped_equal": Metric(
                "groups", "Groups dropped by `flow.dynamic_sampling` since then.", "total"
            ),
            "flow/dropped_late": Metric(
                "groups", "Groups dropped by `flow.late: drop` since then.", "total"
            ),
            "flow/dropped_failed": Metric(
                "groups",
                "Groups dropped since then because one of their requests ended engines, the last"
                " time as the only request.",
                "total",
            ),
            "flow/aborted": Metric(
                "responses",
                "Responses stopped since then on an engine that left, and continued on another.",
                "total",
            ),
            "flow/replayed": Metric(
                "responses", "Responses trained on since then from the store of `replay`.", "total"
            ),
        },
    ),
    "Engines": (
        (
            "State when the batch was taken, or statistics of the time since the previous batch was"
            " taken, according to the engines' reports, which come at least every second. Lists"
            " have one number per engine, starting with engine 0."
        ),
        {
            "engine/busy_share": Metric(
                "share",
                "Share of the time in which an engine sampled (at least one response, not paused),"
                " mean over the engines.",
            ),
            "engine/busy_shares": Metric("share", "The same for each engine.", "per engine"),
            "engine/tokens": Metric(
                "tokens",
                "Response tokens that each engine sampled, for training and evaluation.",
                "per engine",
            ),
            "engine/in_flight": Metric(
                "responses", "Responses given to each engine and not yet finished.", "per engine"
            ),
            "engine/versions": Metric(
                "version",
                "Version of the weights that each engine samples with; -1 for an engine that is"
                " gone.",
                "per engine",
            ),
            "engine/alive": Metric("engines", "Number of engines that take responses."),
            "engine/restarts": Metric(
                "restarts", "Restarts of all engines since the run was started or resumed.", "total"
            ),
        },
    ),
    "Dropped against trained": (
        (
            "Comparison of this step's samples with the finished responses of groups dropped since"
            " the last step, if any: a rule that drops late groups drops long responses."
        ),
        {
            "trained/length_histogram": Metric(
                "responses",
                "Trained responses by length in tokens: 1, 2 to 3, 4 to 7, 8 to 15, ...",
                "doubling counts",
            ),
            "dropped/length_histogram": Metric(
                "responses", "Dropped responses in the same bins.", "doubling counts"
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
    """The entry of `name`, a number after `@` standing for k, the name of a held-out set for SET
    and that of a part of the reward for NAME; None if there is none."""
    name = re.sub(r"@[1-9]\d*$", "@k", name)
    named = re.sub(r"(^reward/|^eval/|^eval/[^/]+/)part/[^/]+$", r"\1part/NAME", name)
    named = re.sub(r"^eval/(?!part/)[^/]+/", "eval/SET/", named)
    return METRICS.get(name) or METRICS.get(named)


HEADER = """# Metrics

`RUN/metrics.jsonl` has one JSON object per batch, which is one optimizer step unless
`objective.minibatches` or `objective.epochs` makes it several. TensorBoard shows the same keys
(`RUN/tensorboard`), and `mar report RUN` draws the main ones. With `observe.prometheus_port`
Prometheus can scrape the newest line: `lag/start_max` is the gauge `mar_lag_start_max`, a list has
a label, `engine` or `bin`, and what is counted so far in the run, such as `flow/consumed`, is the
counter `mar_flow_consumed_total`. The newest `eval/*` stay until the next evaluation. This page is
written by `python -m megatron_async_rl.metrics.catalogue > docs/metrics.md`.

Every line has:

| key | unit | meaning |
| --- | --- | --- |
| `step` | steps | Batches trained on, this one included: the first line has 1. |
| `version` | | Weight version this step produced; it trained on the one before. |
| `time` | Unix seconds | Time of writing: after the step and an evaluation it waited for. |

A key that does not apply to a step (no reward in a supervised run, no cosine on the first step) is
absent from its line. A value that is not finite is written as the string `"nan"`, `"inf"` or
`"-inf"`, so that every line is valid JSON. A run never has two lines for one step: a resume moves
the lines after its checkpoint to `RUN/metrics.cut.jsonl`.
"""


def _several(key: Metric) -> str:
    """A metric's own rule for several optimizer steps, as a sentence."""
    return {
        "sum": " Over several steps: their sum.",
        "largest": " Over several steps: the largest.",
        "first": " Over several steps: the first one's.",
        "last": " Over several steps: the last one's.",
    }.get(key.steps, "")


def page() -> str:
    """docs/metrics.md."""
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
