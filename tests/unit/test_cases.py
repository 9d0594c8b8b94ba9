"""A table of cases is one test whose failure names the case."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import looped
from tests.thorough import THOROUGH, thorough


def notes_of(test, **fixtures):
    with pytest.raises(AssertionError) as failed:
        test(**fixtures)
    return failed.value.__notes__


def test_a_failure_names_the_first_case_that_fails():
    seen = []

    @looped(("one", "two"), [(1, 2), (3, 4), pytest.param(5, 6, id="later")])
    def test(one, two):
        seen.append(one)
        assert one + two < 5

    assert notes_of(test) == ["case: 3-4"]
    assert seen == [1, 3]


def test_a_case_is_named_by_its_id_and_a_table_within_a_table_by_both():
    @looped("one", lambda: [1, 2], ids=["low", "high"])
    @looped("two", [1, 2], ids=lambda value: f"is{value}")
    def test(one, two):
        assert (one, two) != (2, 1)

    assert notes_of(test) == ["case: is1", "case: high"]


def test_each_case_has_fixtures_of_its_own(tmp_path, monkeypatch, capsys):
    @looped("one", [1, 2])
    def test(one, tmp_path, monkeypatch, capsys):
        assert [*tmp_path.iterdir()] == []
        (tmp_path / "file").touch()
        monkeypatch.setenv(f"MAR_CASE_{one}", "here")
        assert ("MAR_CASE_1" in os.environ) == (one == 1)
        print(one)
        assert capsys.readouterr().out == f"{one}\n"
        print("left over")

    test(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


def test_a_case_that_cannot_run_here_stops_no_other():
    def table(*cases):
        @looped("one", cases)
        def test(one):
            if one == "elsewhere":
                pytest.skip("not here")
            assert one == "here"

        return test

    with pytest.warns(UserWarning, match="skipped case 'elsewhere': not here"):
        table("elsewhere", "here")()
    assert notes_of(table("elsewhere", "wrong")) == ["case: 'wrong'"]
    with pytest.raises(pytest.skip.Exception, match="not here"):
        table("elsewhere", "elsewhere")()
    with pytest.raises(AssertionError, match="no case of the table ran"):
        table()()


def test_thorough_cases_run_in_make_test_all_alone():
    ran = []

    @looped("one", [1, pytest.param(2, marks=thorough)])
    def test(one):
        ran.append(one)

    test()
    assert ran == ([1, 2] if THOROUGH else [1])


def test_an_example_of_hypothesis_runs_on_all_cases():
    @given(number=st.integers(1, 9))
    @settings(max_examples=3, database=None)
    @looped("one", [1, 2])
    def test(one, number):
        assert one == 1 or number == 0

    assert "case: 2" in notes_of(test)
