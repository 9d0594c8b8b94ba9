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
        "Of the samples this step trains on whose reward did not fail.",
        {
            "reward/mean": Metric("reward", "Mean reward of a sample."),
            "reward/std": Metric("reward", "Standard deviation over the samples."),
            "reward/errors": Metric(
                "samples", "Samples whose reward raised, timed out or was not finite."
            ),
            "reward/equal_groups": Metric(
                "share",
                "Groups of several samples whose samples all have the same reward: they teach"
                " nothing.",
            ),
            "reward/part/NAME": Metric(
                "reward",
                "Mean of what has that name: a part of `rollout.reward.parts`, before it is"
                " weighted, or a number that the environment measured, such as `tool_errors` and,"
                " of these, `unread_tool_calls`: calls that the model wrote and vLLM's parser could"
                " not read.",
            ),
        },
    ),
    "Responses": (
        "Of the samples this step trains on.",
        {
            "response/length_mean": Metric("tokens", "Mean response length."),
            "response/length_max": Metric("tokens", "Longest response."),
            "response/truncated": Metric(
                "share", "Responses cut at `rollout.sampling.max_tokens`."
            ),
            "response/mixed_versions": Metric(
                "share", "Responses sampled by more than one weight version."
            ),
            "response/turns_mean": Metric(
                "turns",
                "Where a sample has several, by `rollout.environment` or as given: those that are"
                " trained on.",
            ),
            "response/segments_mean": Metric(
                "segments",
                "Where a sample has several, by `rollout.environment.max_segments`: sequences of"
                " each.",
            ),
            "response/environment_share": Metric(
                "share",
                "There: response tokens that are not trained on, such as an environment's.",
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
                "Gradient norm before the controls over the median of the last 50 steps; absent"
                " unless it is more than 20 and the norm is above clip_grad. What made it is in"
                " `anomalies.jsonl`.",
                steps="largest",
            ),
            "policy/lr": Metric("per step", "Learning rate of the scheduler."),
            "policy/lr_scale": Metric(
                "factor",
                "What the gradient controls multiplied the learning rate by, this step only.",
            ),
            "policy/beta1": Metric("factor", "Decay of Adam's first moment, this step."),
            "policy/micro_batches": Metric(
                "micro-batches", "Of one data-parallel rank.", steps="sum"
            ),
            "policy/padding_share": Metric("share", "Padding among all tokens computed."),
            "policy/rerouted": Metric(
                "share",
                "With policy.routing_replay: of the replayed choices of experts, one for each token"
                " and layer, those that the router would not have made itself.",
            ),
            "policy/skipped": Metric(
                "0 or 1",
                "1: no optimizer step (a control skipped it, the gradient was not finite, or the"
                " batch was empty). Of several steps the share that was not made.",
            ),
            "policy/nonfinite": Metric(
                "steps",
                "Skipped so far because the loss or the gradient was not finite;"
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
        f"Between the trained policy before this step and the {MU}, on the tokens trained on.",
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
                "The same over responses sampled wholly by the version trained: it should be"
                " rounding. Absent where there are none.",
                steps="first",
            ),
            "ratio/prox_diff_max": Metric(
                "nats",
                "`proximal: ewma` or `snapshot`: largest |logp_prox - logp_behavior| of a token."
                " With `snapshot` and `rollout.in_flight: recompute` it should be rounding.",
            ),
        },
    ),
    "Loss terms": (
        (
            "What is added to the objective's loss, each with its factor; all are part of"
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
            "clip/positive": Metric("share", "Of the tokens with a positive advantage."),
            "clip/negative": Metric("share", "Of the tokens with a negative advantage."),
            "clip/rejected": Metric("share", "Of all trained tokens: rejected by corrections."),
            "clip/weight_mean": Metric(
                "factor", "Mean weight of a trained token after all corrections."
            ),
        },
    ),
    "Objective decisions": (
        (
            "What a loss decided from the whole batch before the step. Each is there for the losses"
            " named."
        ),
        {
            "objective/second_moment": Metric(
                "nats²", "`m2po`: mean (log w)² over the candidate tokens, before any is cut."
            ),
            "objective/log_ratio_cap": Metric(
                "nats",
                "`m2po`, mode cap: |log w| is clipped here; the largest one where the bound holds"
                " without.",
            ),
            "objective/clip_low": Metric("ratio", "`bapo`: lower bound of the ratio, this step."),
            "objective/clip_high": Metric("ratio", "`bapo`: upper bound of the ratio, this step."),
            "objective/positive_share": Metric(
                "share", "`bapo`: of tokens with a positive advantage in the loss's magnitude."
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
                "Mean over samples of |b - mean reward of the group|: what the measured weights"
                " change.",
            ),
        },
    ),
    "Gradient alignment control": (
        "Present when `controls` has `gac`, or `matched_norm`, which reports what gac would do.",
        {
            "gac/cosine": Metric(
                "cosine", "Between this step's gradient and the previous one, over the whole model."
            ),
            "gac/regime": Metric(
                "code", "What was done: 0 kept, 1 projected, 2 skipped.", steps="largest"
            ),
            "gac/skips": Metric("steps", "Skipped so far in the run.", "total"),
            "gac/removed": Metric(
                "share",
                "Length of what projection took away, over the gradient's own: |g - g'| / |g|.",
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
            "gac/kept": Metric("steps", "Kept so far in the run.", "total"),
            "gac/projected": Metric("steps", "Projected so far in the run.", "total"),
            "gac/cosine_kept": Metric("cosine", "Mean so far over the steps kept.", steps="last"),
            "gac/cosine_projected": Metric(
                "cosine", "Mean so far over the steps projected.", steps="last"
            ),
            "gac/cosine_skipped": Metric(
                "cosine", "Mean so far over the steps skipped.", steps="last"
            ),
        },
    ),
    "Other controls": (
        (
            "Each present when `controls` has the control it is named after, `update/norm` with"
            " `matched_lr` and where `policy.optimizer.log_update_norm` asks for it."
        ),
        {
            "update/norm": Metric(
                "L2 norm",
                "Length of what the optimizer added to the weights, decay apart; 0 for no step.",
            ),
            "matched_norm/scale": Metric(
                "factor", "On the clipped gradient: |g'| / |g| of the projection not made."
            ),
            "matched_lr/scale": Metric(
                "factor", "On the learning rate, to make the mean update as long as the target."
            ),
            "momentum/cosine": Metric(
                "cosine",
                "Between the gradient and Adam's first moment, or the last update turned round.",
            ),
            "displacement/cosine": Metric(
                "cosine",
                "Of the coming update with the way from the weights that sampled its batch.",
            ),
            "displacement/removed": Metric(
                "share", "Length of what was taken from the update, over its own: |u - u'| / |u|."
            ),
            "ess_lr/scale": Metric(
                "factor", "On the learning rate, from the effective sample size."
            ),
            "ess_lr/ess_ratio": Metric(
                "share", "Effective sample size over the number of samples, of the weights it uses."
            ),
            "ess_lr/reference_ratio": Metric(
                "share", "`ess_lr/ess_ratio` at which the learning rate is whole."
            ),
        },
    ),
    "Lag": (
        "Weight version trained minus weight version that sampled.",
        {
            "lag/start_mean": Metric("versions", "Mean over samples, of their first token."),
            "lag/start_max": Metric(
                "versions",
                "Largest over samples, of their first token: the number the staleness law bounds.",
            ),
            "lag/mean": Metric("versions", "Mean over response tokens."),
            "lag/max": Metric("versions", "Largest over response tokens."),
            "lag/histogram": Metric(
                "tokens", "Response tokens per lag: the first entry has lag 0.", "counts"
            ),
            "staleness/drift": Metric(
                "L2 norm",
                "S·η·G of the planning rule (arXiv 2607.01083): `lag/start_max` times"
                " `update/norm`, which is η·G, times the optimizer steps of a batch. How far the"
                " policy went since the oldest sample, had every update been as long as this one"
                " and gone the same way.",
            ),
        },
    ),
    "Tokens": (
        "",
        {
            "tokens/generated": Metric(
                "tokens",
                "Response tokens the training engines sampled for training since the last step, as"
                " far as they have reported; of aborted responses too, not an environment's.",
            ),
            "tokens/trained": Metric("tokens", "Response tokens with loss, this step."),
            "tokens/prompt": Metric("tokens", "Prompt tokens of this step's samples."),
        },
    ),
    "Time": (
        "Of rank 0.",
        {
            "time/wait_batch_s": Metric("s", "Waiting for the batch."),
            "time/train_s": Metric("s", "Forward, backward and optimizer steps."),
            "time/precompute_s": Metric(
                "s",
                "Part of `time/train_s`: log-probs and other numbers of the whole batch, where"
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
                "Handing the new weights over: waiting for their place, digests, copies; with"
                " `weights.transport: cuda_ipc` until the engines have loaded them.",
            ),
            "time/sleep_s": Metric(
                "s", "Colocated: waiting until every engine sleeps and has given up its memory."
            ),
            "time/make_room_s": Metric(
                "s",
                "Colocated: the policy takes its training state back from host memory, and after"
                " the step moves it there.",
            ),
            "time/step_s": Metric(
                "s",
                "The whole step, from asking for the batch on; evaluation and checkpoint apart.",
            ),
        },
    ),
    "Weights": (
        (
            "The newest version that an engine had loaded when the batch was taken. Engines load"
            " while the batch before trains, so a version may be in two lines."
        ),
        {
            "weights/publish_s": Metric("s", "From the first bucket to the last engine's answer."),
            "weights/publish_bytes": Metric("bytes", "Sent to each engine."),
            "weights/pause_s": Metric("s", "Longest pause of an engine."),
            "weights/relay_s": Metric(
                "s",
                "With `weights.transport: relay` or `collective`: until the newest version that"
                " reached another machine, or an engine's own memory, was there, whole and"
                " verified; of the slowest.",
            ),
            "weights/relay_bytes": Metric(
                "bytes", "Received for it by all of them, what came twice included."
            ),
        },
    ),
    "Evaluation": (
        (
            "Of the held-out evaluation that ended since the last step, if one did, and of the last"
            " one if several did. TensorBoard shows each at the version evaluated; `RUN/eval.jsonl`"
            " has every evaluation, prompt by prompt where prompts were sampled."
        ),
        {
            "eval/mean": Metric("reward", "Mean over prompts of their responses' mean reward."),
            "eval/loss": Metric(
                "nats per token",
                "With `loss: sft`: -log p of the held-out responses, over the tokens that would be"
                " trained on, each row by its weight; on the training data it would be"
                " `policy/loss` with `aggregation: token-mean`.",
            ),
            "eval/pass@k": Metric(
                "share",
                "Prompts that one of k responses passes (unbiased estimate); a key for each k of"
                " `eval.pass_at`, such as `eval/pass@4`.",
            ),
            "eval/part/NAME": Metric(
                "reward",
                "With `rollout.reward.parts`: the same of the part of that name, before it is"
                " weighted.",
            ),
            "eval/SET/mean": Metric(
                "reward",
                "With `eval.sets`: of the set of that name. What has no name is the first set's.",
            ),
            "eval/SET/loss": Metric("nats per token", "The same of the held-out loss."),
            "eval/SET/pass@k": Metric("share", "The same of pass@k."),
            "eval/SET/part/NAME": Metric("reward", "The same of a part of the reward."),
            "eval/SET/truncated": Metric("share", "The same of the truncated share."),
            "eval/version": Metric("version", "Weights evaluated."),
            "eval/truncated": Metric("share", "Responses cut at `rollout.sampling.max_tokens`."),
            "eval/seconds": Metric(
                "s", "From the first request to the last response, or over all held-out responses."
            ),
        },
    ),
    "Flow": (
        "When the step ended.",
        {
            "flow/in_flight": Metric("responses", "Given to an engine and not yet finished."),
            "flow/waiting": Metric("responses", "Admitted and not yet given to an engine."),
            "flow/buffer": Metric("groups", "Complete and waiting to be trained on."),
            "flow/admitted": Metric(
                "groups",
                "Admitted since the run was started or resumed; what a resume took up counts.",
                "total",
            ),
            "flow/consumed": Metric("groups", "Trained on, since then too.", "total"),
            "flow/dropped_equal": Metric(
                "groups", "Dropped by `flow.dynamic_sampling`, since then too.", "total"
            ),
            "flow/dropped_late": Metric(
                "groups", "Dropped by `flow.late: drop`, since then too.", "total"
            ),
            "flow/dropped_failed": Metric(
                "groups",
                "Dropped as one of its requests ended engines, the last one alone, since then too.",
                "total",
            ),
            "flow/aborted": Metric(
                "responses",
                "Stopped on an engine that left, and continued on another, since then too.",
                "total",
            ),
            "flow/replayed": Metric(
                "responses", "Trained on out of the store of `replay`, since then too.", "total"
            ),
        },
    ),
    "Engines": (
        (
            "Of the time between taking the batch before and taking this one, or of the moment it"
            " was taken, as far as the engines had reported, which they do every second at least."
            " Lists have one number for each engine, the first for"
            " engine 0."
        ),
        {
            "engine/busy_share": Metric(
                "share",
                "Time an engine sampled, mean over engines: at least one response, not paused.",
            ),
            "engine/busy_shares": Metric("share", "The same of each engine.", "per engine"),
            "engine/tokens": Metric(
                "tokens",
                "Response tokens each engine sampled, for training and evaluation.",
                "per engine",
            ),
            "engine/in_flight": Metric(
                "responses", "Given to each engine and not yet finished.", "per engine"
            ),
            "engine/versions": Metric(
                "version",
                "Weights each engine samples with; -1 for an engine that is gone.",
                "per engine",
            ),
            "engine/alive": Metric("engines", "That take responses."),
            "engine/restarts": Metric(
                "restarts", "Of all engines, since the run was started or resumed.", "total"
            ),
        },
    ),
    "Dropped against trained": (
        (
            "Of this step's samples and, where any were dropped since the last step, of the"
            " finished responses of dropped groups: a rule that drops late groups drops long"
            " responses."
        ),
        {
            "trained/length_histogram": Metric(
                "responses",
                "Trained on, by length in tokens: 1, 2 to 3, 4 to 7, 8 to 15, ...",
                "doubling counts",
            ),
            "dropped/length_histogram": Metric(
                "responses", "Dropped, in the same bins.", "doubling counts"
            ),
            "dropped/responses": Metric("responses", "Dropped."),
            "dropped/length_mean": Metric("tokens", "Mean length of those dropped."),
            "dropped/reward_mean": Metric(
                "reward", "Mean reward of those dropped whose reward did not fail."
            ),
        },
    ),
}

METRICS: Mapping[str, Metric] = {
    name: key for _, keys in GROUPS.values() for name, key in keys.items()
}


def find_metric(name: str) -> Metric | None:
    """The entry of `name`, a number after `@` standing for k, the name of a held-out set for SET
    and that of a part of the reward for NAME; None where there is none."""
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
