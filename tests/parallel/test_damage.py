"""Every file of a checkpoint is checked before it is used, and good checkpoints outlive damage."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parallel import layouts
from tests.parallel.damage_program import SETTINGS
from tests.parallel.ranks import run_alone

pytestmark = pytest.mark.parallel


@functools.cache
def results() -> dict[str, Any]:
    offered = {"single": layouts.EVERY_LAYOUT["single"]}
    found = layouts.run_program("damage_program", layouts.material(), offered, 1)
    if isinstance(found, AssertionError):
        raise found
    return found["single"]


@pytest.mark.parametrize("name", SETTINGS)
def test_flipped_bits_cut_files_and_missing_files_are_all_reported_as_damage(name: str) -> None:
    found = results()[name]
    assert found["load"] == []
    assert found["all"] == []
    assert found["whole"] == "", "the damage was undone"


def test_the_damaged_checkpoints_held_every_kind_of_state() -> None:
    kinds = [kind for name in SETTINGS for kind in results()[name]["kinds"]]
    for kind in ("model", "adam.exp_avg", "adam.master", "control.gac", "past_weights_1"):
        assert any(each.startswith(kind) for each in kinds), kind
    assert "reference.value_head" in results()["adapters"]["kinds"]


def test_damage_names_the_file_the_tensor_and_the_older_checkpoint() -> None:
    refused = results()["rotation"]["refused"]
    assert "step_00000006 is damaged: sharded/__0_0.distcp: tensor parameter_state." in refused
    assert "write step_00000004 into" in refused


def test_good_checkpoints_are_not_removed_for_damaged_ones() -> None:
    found = results()["rotation"]
    numbers = {
        name: [int(each[5:]) for each in kept if each != "latest"]
        for name, kept in found.items()
        if isinstance(kept, list)
    }
    assert numbers == {
        "left behind": [4, 5, 6],
        "passed": [5, 6, 7],
        "incomplete": [5, 6, 7, 8],
        "whole": [8, 9],
    }


def test_a_damaged_pointer_is_refused_with_the_newest_checkpoint() -> None:
    assert "step_00000009" in results()["rotation"]["pointer"].partition("fix")[2]


def test_a_write_that_reads_back_differently_keeps_the_checkpoint_before() -> None:
    found = results()["write"]
    assert "right after it was written" in found["raised"]
    assert found["left"] == ["latest", "step_00000001"]


def test_a_fixed_reference_with_other_weights_is_refused() -> None:
    assert "trained with other reference weights" in results()["reference"]


def test_an_export_has_digests_of_its_files_and_damage_stops_the_conversion(tmp_path) -> None:
    found = results()["export"]
    assert found["unnoticed"] == []
    with pytest.raises(AssertionError, match=r"is damaged: sharded/__0_0\.distcp: tensor"):
        run_alone("tests.parallel.convert_program", [found["damaged"], tmp_path / "hf"])
    assert not (tmp_path / "hf").exists()
