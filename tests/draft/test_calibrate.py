"""Temperatures from one half of the prompts, the report from the other."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tests.draft.calibrate_toy import by_prompt, known_rounds
from tokennorm.draft.calibration.metrics import calibration_report
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.calibration.result import CalibrationResult, calibrate
from tokennorm.draft.calibration.sts import fit_sts, read_sts
from tokennorm.draft.decoding.rounds import Round
from tokennorm.errors import ConfigError, DataError, MissingDependencyError


@pytest.fixture(scope="module")
def result() -> CalibrationResult:
    return calibrate(by_prompt(known_rounds(rounds=8000, proposals=3, scale=2.5, end=0.01, seed=1)), seed=7)


def test_fitted_on_one_half_and_reported_on_the_other(result: CalibrationResult) -> None:
    outcomes = PrefixOutcomes.of(by_prompt(known_rounds(rounds=8000, proposals=3, scale=2.5, end=0.01, seed=1)))
    fit, held = outcomes.split(7)
    assert list(result.temperatures) == fit_sts(fit) != fit_sts(held)
    assert result.before == calibration_report(held)
    assert result.after == calibration_report(held, result.temperatures)
    assert (result.fit_prompts, result.held_prompts) == (200, 200)
    assert (result.fit_rounds, result.held_rounds) == (4000, 4000)
    assert result.fit_observed == tuple(fit.observed.sum(dim=0).tolist())
    assert result.fitted == (True, True, True)
    for before, after in zip(result.before.positions, result.after.positions, strict=True):
        assert before.ece > 0.1
        assert after.ece < 2 * after.ece_floor


def test_as_text(result: CalibrationResult) -> None:
    lines = result.table().splitlines()
    assert lines[0].startswith(
        "Temperatures fitted on 4000 rounds of 200 prompts, reported on 4000 rounds of 200 "
    )
    table = lines[2:7]
    assert len({len(line) for line in table}) == 1, "columns are aligned"
    first = result.before.positions[0], result.after.positions[0]
    assert f"{100 * first[0].ece:.2f} > {100 * first[1].ece:.2f}" in table[1]
    assert f"{result.temperatures[0]:.3f}" in table[1]
    assert table[-1].split()[0] == "all"
    assert "*" not in result.table()

    rows = [line for line in result.markdown().splitlines() if line.startswith("|")]
    assert len(rows) == 6
    assert len({line.count("|") for line in rows}) == 1
    assert f"{first[0].brier:.3f} > {first[1].brier:.3f}" in rows[2]


def test_as_files(result: CalibrationResult, tmp_path: Path) -> None:
    assert json.loads(result.to_json()) == result.to_dict()
    result.write(tmp_path / "sts.json")
    assert read_sts(tmp_path / "sts.json", num_proposals=3) == list(result.temperatures)
    content = json.loads((tmp_path / "sts.json").read_text())
    assert content["calibration"]["before"]["positions"][0]["ece"] == result.before.positions[0].ece
    assert content["calibration"]["after"]["positions"][0]["ece"] == result.after.positions[0].ece


def test_as_a_plot(result: CalibrationResult, tmp_path: Path) -> None:
    result.plot(tmp_path / "calibration.svg")
    drawn = (tmp_path / "calibration.svg").read_text()
    # Matplotlib keeps the words of a text in a comment beside its outlines.
    for words in ("proposal 3", "calibration error", "chance alone", "before", "after"):
        assert words in drawn
    with pytest.raises(ConfigError, match="can't be written"):
        result.plot(tmp_path / "calibration.words")
    with pytest.raises(ConfigError, match="can't be written"):
        result.plot(tmp_path / "nowhere" / "calibration.svg")


def test_a_plot_without_matplotlib(result: CalibrationResult, tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "tokennorm\[draft\]"'):
        result.plot(tmp_path / "calibration.png")


def test_what_could_not_be_fitted_is_marked(tmp_path: Path) -> None:
    # One proposal more than was ever verified, and a first one that is never rejected.
    rounds = [
        dataclasses.replace(each, accepted=max(each.accepted, 1))
        for each in known_rounds(rounds=240, proposals=2, seed=2)
    ]
    result = calibrate(by_prompt(rounds), num_proposals=3)
    assert result.fitted == (False, True, False)
    assert (result.temperatures[0], result.temperatures[2]) == (1.0, 1.0)
    rows = result.table().splitlines()[3:6]
    assert ["1.000*" in row for row in rows] == [True, False, True]
    assert rows[2].split() == [
        "3",
        "1.000*",
        "0",
        "-",
        "-",
        ">",
        "-",
        "-",
        ">",
        "-",
        "-",
        "-",
        ">",
        "-",
        "-",
        ">",
        "-",
    ]
    assert "* not fitted" in result.table()
    assert "\\* not fitted" in result.markdown()
    json.loads(result.to_json())
    result.plot(tmp_path / "calibration.svg")


def test_one_proposal(tmp_path: Path) -> None:
    result = calibrate(by_prompt(known_rounds(rounds=400, proposals=1, scale=3.0, seed=3)))
    assert result.fitted == (True,)
    assert result.after.overall == result.after.positions[0] == result.after.conditional[0]
    assert result.after.overall.ece < result.before.overall.ece
    result.plot(tmp_path / "calibration.svg")


def test_too_few_rounds() -> None:
    prompts = by_prompt(known_rounds(rounds=180, seed=4))
    message = r"100 rounds of 5 prompts to fit temperatures, 80 rounds of 4 .* needs 100"
    with pytest.raises(DataError, match=message):
        calibrate(prompts)
    assert calibrate(prompts, min_rounds=80).held_rounds == 80
    # All rounds of one prompt go into one half, however many they are.
    with pytest.raises(DataError, match="0 rounds of 0 prompts to report on"):
        calibrate([known_rounds(rounds=500)])
    idle = Round(proposed=0, accepted=0, emitted=1, ended=False, confidence=())
    for nothing in ([], [[idle] * 200, [idle] * 200]):
        with pytest.raises(DataError, match="0 rounds"):
            calibrate(nothing, min_rounds=0)


def test_rounds_must_come_by_prompt() -> None:
    with pytest.raises(DataError, match="not rounds by prompt"):
        calibrate(known_rounds(rounds=300))
