"""Engine with four workers: two pipeline stages of two workers, which have half of the experts of
their stage each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_async_rl.samples import Sample
from megatron_async_rl.weights.manifest import WeightMismatch
from tests.engine.asking import attempts, grown, outcomes, submit
from tests.engine.reference import save_checkpoint
from tests.engine.running import TOLERANCE, Engines, prompt_of, running, spans
from tests.staged import flip_a_bit
from tests.thorough import thorough

pytestmark = [pytest.mark.engine, thorough]

EXPERTS = 6


@pytest.fixture(scope="module")
def engines(in_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    root = tmp_path_factory.mktemp("workers")
    checkpoints = [
        save_checkpoint(
            root / name,
            seed=seed,
            kv_heads=2,
            family="qwen3_moe",
            num_experts=EXPERTS,
            moe_intermediate_size=32,
        )
        for seed, name in enumerate("ab")
    ]
    settings = {
        "sampling": {"max_tokens": 400},
        "in_flight": "recompute",
        "tensor": 2,
        "pipeline": 2,
        "vllm": {"enable_expert_parallel": True},
    }
    with running(lambda: Engines(root, [settings], checkpoints)) as started:
        yield started


def test_four_workers_sample_with_new_weights_like_one_and_verify_every_part(
    engines: Engines,
) -> None:
    (handle,) = engines.handles
    through: list[Sample] = []
    for _ in attempts("continued after the update"):
        requests = engines.requests([prompt_of(9, seed) for seed in range(6)], 2)
        submit(handle, requests)
        early = grown(handle)
        engines.publish(1 - engines.of_version[engines.version])
        ids = [request.id for request in requests if request.id not in early]
        samples = [sample for sample in outcomes(handle, ids) if isinstance(sample, Sample)]
        through = [sample for sample in samples if len(set(sample.versions.tolist())) == 2]
        if through:
            break
    for sample in through:
        (old, start, end), (new, since, _) = spans(sample)
        assert engines.difference(0, sample, old, start, end) < TOLERANCE
        assert engines.difference(0, sample, new, since) < TOLERANCE

    kept = engines.of_version[engines.version]
    for victim in (  # one weight for each worker, and a weight of both stages
        *(
            f"model.layers.{n}.mlp.experts.{e}.up_proj.weight"
            for n in (0, 1)
            for e in (0, EXPERTS - 1)
        ),
        "model.embed_tokens.weight",
    ):
        manifest = engines.stage(kept)
        flip_a_bit(manifest, victim)
        with pytest.raises(WeightMismatch) as failure:
            engines.feed(manifest)
        assert failure.value.name == victim
        assert failure.value.loaded is not None
    engines.publish(1 - kept)
    for (sample,) in engines.groups(0, [prompt_of(9, seed) for seed in range(4)], 1):
        assert engines.difference(0, sample, engines.version) < TOLERANCE
        assert engines.difference(0, sample, engines.version - 1) > 0.1
