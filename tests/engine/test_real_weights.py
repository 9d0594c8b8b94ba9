"""An engine that serves a real pre-trained model samples by the log-probs of transformers."""

from __future__ import annotations

import pytest

from tests.engine.running import Engines, running
from tests.real_models import COMMANDS, FOLDER, case_of, prompts
from tests.thorough import thorough

pytestmark = [pytest.mark.engine, thorough]

SAMPLING = {"temperature": 1.0, "max_tokens": 16}


@pytest.mark.parametrize("model", [case_of(name) for name in COMMANDS])
def test_log_probs_of_an_engine_are_those_of_transformers(
    in_ray: None, tmp_path_factory: pytest.TempPathFactory, model: str
) -> None:
    root = tmp_path_factory.mktemp(f"real-{model}")
    settings = [{"sampling": SAMPLING, "max_context": 256}]
    with running(lambda: Engines(root, settings, [FOLDER / model])) as engines:
        for group in engines.groups(0, prompts(model), 2):
            for sample in group:
                assert sample.length
                assert engines.difference(0, sample, 0) < 2e-4
