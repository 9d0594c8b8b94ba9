"""Cases of reference vectors: their file format, and their execution by the registered methods.

A file is a JSON list of cases (`case`, `kind`, `name`, `params`, `inputs`, `expect`). Tensors over
tokens are [sequence][token], padded with mask 0; tensors over sequences are [sequence]. The `dtype`
of a case is the precision of its expected numbers; the default is float32, which has wider
tolerances.

Invariants: a case runs in the same way as a batch of a training step.
- `params` are validated by the config's own models, so a case has only settings that a config may
  have;
- `decide` receives the whole batch before the loss runs, and the aggregation uses the denominators
  of the whole batch;
- padding stays in the batch with mask 0 and must have no effect.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_async_rl.config.controls import EssLrControl
from megatron_async_rl.config.keys import method_name, models_in, nearest
from megatron_async_rl.config.objective import ObjectiveConfig
from megatron_async_rl.config.problem import UserError, shipped
from megatron_async_rl.config.settings_model import Strict, method_of
from megatron_async_rl.controls.ess_lr import lr_scale
from megatron_async_rl.objectives.batch import BatchDecision, SequenceLoss, TokenBatch
from megatron_async_rl.objectives.method import AdvantageMethod, CorrectionMethod, LossMethod
from megatron_async_rl.objectives.objective import Denominators, aggregate
from megatron_async_rl.objectives.off_policy import effective_sample_size
from megatron_async_rl.objectives.terms import token_rewards

KEYS = {"case": str, "kind": str, "name": str, "params": dict, "inputs": dict, "expect": dict}
"""Required keys of a case and the type of each value."""
DTYPES = ("float32", "float64")
"""Values of `dtype`; the first is the default."""

Numbers = NDArray[np.float64]


class Malformed(ValueError):
    """Error for content that does not describe a case. `read_cases` adds the file and the case."""


@dataclass(frozen=True, eq=False)
class Case:
    """One case of a file. inputs, expect: [S, T] for tensors over tokens, [S] for tensors over
    sequences, [] for scalars."""

    case: str
    kind: str
    name: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Numbers]
    expect: Mapping[str, Numbers]
    dtype: str
    """Precision in which `expect` was computed: float32 or float64."""


def read_cases(file: Path) -> list[Case]:
    """Return the cases of `file` in order, after checking all of them. Raises UserError, which
    names the file and the case."""

    def refuse(what: str) -> NoReturn:
        raise UserError.of(
            str(file), what, f"see {shipped('tests/data/golden/README.md')} for the format"
        )

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise UserError.of(str(file), what, "name a JSON file of cases") from error
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON: {error}")
    if not isinstance(content, list) or not content:
        refuse("expected a JSON list of at least one case")
    cases: dict[str, Case] = {}
    for number, entry in enumerate(content):
        if not isinstance(entry, dict):
            refuse(f"entry {number}: expected an object with keys {', '.join(KEYS)}")
        # Prefer the name of the case, because its number changes when the file is edited.
        label = (
            f"case {entry['case']!r}" if isinstance(entry.get("case"), str) else f"entry {number}"
        )
        for key, kind in KEYS.items():
            if key not in entry:
                refuse(f"{label}: has no `{key}`")
            if not isinstance(entry[key], kind):
                refuse(f"{label}: `{key}` is {type(entry[key]).__name__}, expected {kind.__name__}")
        dtype = entry.get("dtype", DTYPES[0])
        if dtype not in DTYPES:
            refuse(f"{label}: `dtype` is {dtype!r}, expected one of {', '.join(DTYPES)}")
        # The output lists results by name, so a name must be unique.
        if entry["case"] in cases:
            refuse(f"{label}: occurs twice; each case of a file needs a unique name")
        try:
            inputs, expect = (
                {key: _numbers(key, value) for key, value in entry[part].items()}
                for part in ("inputs", "expect")
            )
            _check_shapes(inputs, expect)
        except Malformed as error:
            refuse(f"{label}: {error}")
        # The dict keeps the order of the file, which is the order of the output.
        cases[entry["case"]] = Case(
            entry["case"], entry["kind"], entry["name"], entry["params"], inputs, expect, dtype
        )
    return list(cases.values())


def _numbers(key: str, value: Any) -> Numbers:
    """Return a JSON value as an array of at most two dimensions. Raises Malformed."""
    rows = value if isinstance(value, list) else [value]
    # Check here, because NumPy's error for ragged rows does not name the key.
    if len({len(row) if isinstance(row, list) else -1 for row in rows}) > 1:
        raise Malformed(f"`{key}`: its rows differ in length")
    flat = [number for row in rows for number in (row if isinstance(row, list) else [row])]
    # `number == number` excludes nan. math.isnan would raise OverflowError for a large integer.
    if not all(isinstance(number, (int, float)) and number == number for number in flat):
        raise Malformed(f"`{key}`: expected numbers: [sequence][token], [sequence] or a scalar")
    try:
        return np.array(value, dtype=np.float64)
    except OverflowError:
        raise Malformed(f"`{key}`: contains a number outside the range of float64") from None


def _check_shapes(inputs: Mapping[str, Numbers], expect: Mapping[str, Numbers]) -> None:
    """Raise Malformed if the tensors of a case differ in shape, if `mask` is invalid, or if nothing
    is expected."""
    if not expect:
        raise Malformed("`expect` is empty: there is nothing to compare")
    # Compare the numbers of sequences first: if they differ, the error names only them.
    for dimensions in (1, 2):
        shapes = {
            key: values.shape[:dimensions]
            for key, values in [*inputs.items(), *expect.items()]
            if values.ndim >= dimensions
        }
        if len(set(shapes.values())) > 1:
            raise Malformed(
                "shapes differ: "
                + ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
            )
    mask = inputs.get("mask")
    if mask is not None and (mask.ndim != 2 or not np.isin(mask, (0.0, 1.0)).all()):
        raise Malformed("`mask`: expected [sequence][token] of 0 and 1")


POLICIES = ("logp", "logp_prox", "logp_behavior")
"""Columns of log-probabilities. A column missing from a case equals the first column present."""
COLUMNS = tuple(
    field.name
    for field in dataclasses.fields(TokenBatch)
    if field.name not in ("sequence", "sequences", "decided")
)
"""Columns of a batch that a case may have in `inputs`."""
PER_SEQUENCE = ("rewards", "group", "score_norms")
"""Columns with one number per sequence; all others have one per token."""


def settings_of(section: str, name: str, params: Mapping[str, Any]) -> Strict:
    """Return the settings of method `name`, validated as in `objective.<section>`. Raises
    ValidationError for invalid params, and ValueError for an unknown name."""
    # Use the config's own models, so a case has only settings that a config may have.
    models = models_in(ObjectiveConfig.model_fields[section].annotation)
    for model in models:
        if method_name(model) == name:
            return model.model_validate({**params, "name": name})
    known = [str(method_name(model)) for model in models]
    raise ValueError(
        f"unknown {section} {name!r}; nearest: {nearest(name, known) or 'none'}; known:"
        f" {', '.join(sorted(known))}"
    )


def batch_of(case: Case) -> TokenBatch:
    """Return the case as a whole batch in float64, without gradients. [S, T] inputs are flattened
    to [S * T]. Raises ValueError for an invalid column."""
    if "mask" not in case.inputs:
        raise ValueError("inputs.mask is missing")
    rows, length = case.inputs["mask"].shape
    inputs: dict[str, Any] = {}
    for key, values in case.inputs.items():
        if key not in COLUMNS:
            raise ValueError(
                f"inputs.{key} is not a column of a batch; nearest:"
                f" {nearest(key, COLUMNS) or 'none'}"
            )
        if (values.ndim == 1) != (key in PER_SEQUENCE) or not values.ndim:
            raise ValueError(
                f"inputs.{key}: expected one number per"
                f" {'sequence' if key in PER_SEQUENCE else 'token'}"
            )
        # Padding stays in the flat batch, with mask 0.
        inputs[key] = torch.from_numpy(values.flatten()).to(
            torch.int64 if key in ("group", "lag") else torch.float64
        )
    # nan makes a method fail visibly if it reads log-probabilities and the case has none.
    missing = torch.full((rows * length,), math.nan, dtype=torch.float64)
    first = next((inputs[key] for key in POLICIES if key in inputs), missing)
    columns: dict[str, Any] = {
        **dict.fromkeys(POLICIES, first),
        "advantages": torch.zeros_like(missing),
        "weights": torch.ones_like(missing),
        "sequence": torch.arange(rows).repeat_interleave(length),
        "sequences": rows,
    }
    batch = TokenBatch(**(columns | inputs))
    if batch.rewards is None:
        return batch
    # Training computes token rewards before the method runs. A case has no KL penalty.
    batch = batch.replace(token_rewards=token_rewards(batch, torch.zeros_like(batch.mask)))
    return (
        batch
        if "advantages" in inputs
        else batch.replace(advantages=batch.per_token(batch.require("rewards")))
    )


def micro_batch(whole: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """Return a whole batch as one micro-batch, with its floating-point columns in `dtype`."""

    def cast(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in values.items()
        }

    columns = {key: value for key in COLUMNS if isinstance(value := getattr(whole, key), Tensor)}
    decided = BatchDecision(
        cast(whole.decided.tokens), cast(whole.decided.sequences), whole.decided.scalars
    )
    # A micro-batch of a training step has no groups, because it may contain only part of a group.
    return dataclasses.replace(whole, **(cast(columns) | {"group": None, "decided": decided}))


def _decided(name: str, case: Case, params: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the scalars that the loss `name` decides from the whole batch, by metric name."""
    settings: Any = settings_of("loss", name, params)
    decide = method_of(settings).decide
    assert decide is not None, name
    return decide(batch_of(case), settings).scalars


def _m2po_cap(case: Case) -> dict[str, float]:
    # M2PO decides a cap only in this mode.
    decided = _decided("m2po", case, {**case.params, "mode": "cap"})
    return {"log_ratio_cap": decided["objective/log_ratio_cap"]}


def _bapo(case: Case) -> dict[str, float]:
    decided = _decided("bapo", case, case.params)
    return {
        name: decided.get(f"objective/{name}", math.nan)
        for name in ("clip_low", "clip_high", "positive_share")
    }


def _ess(case: Case) -> dict[str, float]:
    batch = batch_of(case)
    # A sequence without tokens has no ratio.
    log_weights = batch.sequence_sum(batch.logp - batch.logp_behavior)[batch.lengths() > 0]
    return _of_log_weights(log_weights.numpy(), case.params)


def _ess_log_weights(case: Case) -> dict[str, float]:
    """Return the ESS of the log-weights in `inputs`. The parameter `shape` describes how they were
    generated and is not a setting."""
    if "log_weights" not in case.inputs:
        raise ValueError("inputs.log_weights is missing")
    return _of_log_weights(
        case.inputs["log_weights"],
        {key: value for key, value in case.params.items() if key != "shape"},
    )


def _of_log_weights(log_weights: Numbers, params: Mapping[str, Any]) -> dict[str, float]:
    settings = EssLrControl.model_validate(params)
    # `auto` averages over the steps of a run, but a case is a single step.
    if isinstance(settings.reference_ratio, str):
        raise ValueError("params.reference_ratio: auto needs a run; set a number")
    ess = effective_sample_size(log_weights)
    ratio = ess / max(len(log_weights), 1)
    scale = lr_scale(
        ratio, rule=settings.rule, reference_ratio=settings.reference_ratio, floor=settings.floor
    )
    return {"ess": ess, "ess_ratio": ratio, "lr_scale": scale}


SCALARS: Mapping[str, Callable[[Case], dict[str, float]]] = {
    "m2po_cap": _m2po_cap,
    "bapo": _bapo,
    "ess": _ess,
    "ess_log_weights": _ess_log_weights,
}


@dataclass(frozen=True, eq=False)
class CaseValues:
    """Computed numbers of a case. values: by their keys in `expect`. scales: for a sum, the sum of
    its terms' magnitudes, which bounds its rounding error."""

    values: Mapping[str, Numbers]
    scales: Mapping[str, float] = field(default_factory=dict)


def run_case(case: Case, dtype: torch.dtype) -> CaseValues | None:
    """Run the case's method in `dtype`. Return None if training runs the method in float64 only and
    `dtype` is another. Raises ValueError for an unknown kind, method, setting or column."""
    return _known("kind", case.kind, KINDS)(case, dtype)


def _padded(values: Tensor, batch: TokenBatch) -> Numbers:
    """Reshape [N] to [S, T], with 0 at mask 0."""
    kept = torch.where(batch.mask > 0, values.detach().double(), 0.0)
    return np.asarray(kept.reshape(batch.sequences, -1).numpy())


def _policy_loss(case: Case, dtype: torch.dtype) -> CaseValues:
    params = dict(case.params)
    aggregation, norm_length = params.pop("aggregation", None), params.pop("norm_length", None)
    settings: Any = settings_of("loss", case.name, params)
    method: LossMethod = method_of(settings)
    whole = batch_of(case)
    if method.decide is not None:
        # As in a training step, decide from the whole batch before any micro-batch.
        whole = whole.replace(decided=method.decide(whole, settings))
    part = micro_batch(whole, dtype)
    # `logp` must be a leaf of its own, because other columns may share its tensor.
    part = part.replace(logp=part.logp.clone().requires_grad_())
    losses = method.function(part, settings)
    if isinstance(losses, SequenceLoss) and aggregation not in (None, "seq-mean"):
        raise ValueError(
            f"params.aggregation is {aggregation}, but {case.name} has one loss per sequence: set"
            " seq-mean"
        )
    settings_of_sum = (
        part,
        aggregation or settings.default_aggregation,
        Denominators.of(whole),
        norm_length,
    )
    loss = aggregate(losses, *settings_of_sum).sum()
    # A loss that does not depend on `logp` has no gradient.
    (gradient,) = torch.autograd.grad(loss, part.logp, allow_unused=True)
    magnitudes = dataclasses.replace(losses, loss=losses.loss.detach().abs())
    magnitude = aggregate(magnitudes, *settings_of_sum).abs().sum()
    values = {
        "loss": np.array(loss.item()),
        "grad_logp": _padded(
            gradient if gradient is not None else torch.zeros_like(part.logp), part
        ),
        "keep": _padded(~losses.clipped, part),
    }
    return CaseValues(values, {"loss": magnitude.item()})


def _advantage(case: Case, dtype: torch.dtype) -> CaseValues | None:
    # Training computes advantages once per batch, always in float64.
    if dtype != torch.float64:
        return None
    settings: Any = settings_of("advantage", case.name, case.params)
    method: AdvantageMethod = method_of(settings)
    whole = batch_of(case)
    result = method.function(whole, settings)
    values = {"advantages": _padded(result.tokens, whole)}
    if result.returns is not None:
        values["returns"] = _padded(result.returns, whole)
    if result.baselines is not None:
        values["baselines"] = np.asarray(result.baselines.double().numpy())
    return CaseValues(values)


def _correction(case: Case, dtype: torch.dtype) -> CaseValues | None:
    settings: Any = settings_of("corrections", case.name, case.params)
    method: CorrectionMethod = method_of(settings)
    if dtype != torch.float64 and method.whole(settings):
        return None
    whole = batch_of(case)
    factor = method.function(
        whole if method.whole(settings) else micro_batch(whole, dtype), settings
    )
    return CaseValues({"weights": _padded(factor, whole), "mask": _padded(factor != 0, whole)})


def _known[F](kind: str, name: str, table: Mapping[str, F]) -> F:
    """Return the entry `name` of `table`. Raises ValueError for an unknown name."""
    if name not in table:
        raise ValueError(
            f"unknown {kind} {name!r}; nearest: {nearest(name, [*table]) or 'none'}; known:"
            f" {', '.join(sorted(table))}"
        )
    return table[name]


def _scalar(case: Case, dtype: torch.dtype) -> CaseValues | None:
    if dtype != torch.float64:
        return None
    values = _known("scalar", case.name, SCALARS)(case)
    return CaseValues({key: np.array(value, dtype=np.float64) for key, value in values.items()})


KINDS: Mapping[str, Callable[[Case, torch.dtype], CaseValues | None]] = {
    "policy_loss": _policy_loss,
    "advantage": _advantage,
    "weights": _correction,
    "mask": _correction,
    "scalar": _scalar,
}
