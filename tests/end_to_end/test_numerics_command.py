"""`mar verify CONFIG --numerics` with two tensor-parallel ranks and two vLLM engines."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.end_to_end.workspace import Workspace
from tests.thorough import thorough


def verified(workspace: Workspace, name: str, *overrides: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the scorecard's JSON."""
    config = workspace.config(name)
    tree = yaml.safe_load(config.read_text())
    tree["rollout"] |= {"engines": 2, "in_flight": "keep"}
    config.write_text(yaml.safe_dump(tree))
    written = workspace.folder / f"{name}.json"
    code, said = workspace.mar(
        "verify", config.name, "--numerics", "--json", str(written), *overrides
    )
    assert written.exists(), said
    return code, json.loads(written.read_text())


@thorough
def test_a_sound_config_passes_every_row(workspace: Workspace) -> None:
    code, card = verified(workspace, "numerics")
    assert code == 0, card
    verdicts = {row["name"]: row["verdict"] for row in card["rows"]}
    assert set(verdicts.values()) == {"passed"}, card
    weights = next(row for row in card["rows"] if row["name"] == "weights")
    assert weights["value"].startswith("2 versions, 2 engines, ")
    assert not (workspace.folder / "runs" / "numerics" / "metrics.jsonl").exists()
