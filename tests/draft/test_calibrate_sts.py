"""Sequential temperature scaling: the fit, and the file that servers read."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from tests.draft.calibrate_toy import known_outcomes, known_rounds
from tokennorm.draft.calibration.metrics import calibration_metrics, calibration_report
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.calibration.sts import fit_sts, read_sts, write_sts
from tokennorm.errors import ConfigError


@pytest.mark.parametrize("scale", [2.5, 0.5])
def test_a_planted_scale_is_found(scale: float) -> None:
    temperatures = fit_sts(known_outcomes(rounds=10000, scale=scale, end=0.1, cut=True, seed=1))
    held = known_outcomes(rounds=10000, scale=scale, end=0.1, cut=True, seed=2)
    before, after = calibration_report(held), calibration_report(held, temperatures)
    assert temperatures[:2] == pytest.approx([scale, scale], rel=0.1)
    assert temperatures == pytest.approx([scale] * 4, rel=0.25)
    for old, new in zip(before.positions, after.positions, strict=True):
        assert old.ece > 0.05
        assert new.ece < 0.015
        assert new.brier < old.brier
    # What the fit is for: ranking at the first position is as it was, only the numbers mean something now.
    assert after.positions[0].auroc == before.positions[0].auroc


def test_forgetting_the_end_token_would_give_other_temperatures() -> None:
    rounds = known_rounds(rounds=8000, proposals=2, scale=2.5, end=0.1, seed=3)
    right = fit_sts(PrefixOutcomes.of(rounds))
    mistaken = fit_sts(PrefixOutcomes.of([dataclasses.replace(each, ended=False) for each in rounds]))
    assert right == pytest.approx([2.5] * 2, rel=0.2)
    assert mistaken[0] == right[0]
    assert mistaken[1] > 1.25 * right[1]


def test_no_temperature_of_a_search_by_brute_force_has_a_smaller_error() -> None:
    outcomes = known_outcomes(rounds=500, proposals=3, scale=1.7, end=0.1, seed=4)
    fitted = fit_sts(outcomes, bounds=(0.2, 5.0), grid=41, num_bins=6, noise=0.0)
    for k in range(3):
        rows = outcomes.observed[:, k]

        def error(temperature: float, k: int = k, rows: torch.Tensor = rows) -> float:
            scales = [*fitted[:k], temperature]
            product = torch.ones(int(rows.sum()), dtype=torch.float64)
            for j, scale in enumerate(scales):
                product = product * (outcomes.confidence[rows, j] / scale).sigmoid()
            return calibration_metrics(product, outcomes.survived[rows, k], num_bins=6).ece

        found = error(fitted[k])
        grid = [math.exp(math.log(0.2) + i * math.log(25) / 40) for i in range(41)]
        assert found <= min(map(error, grid)) + 1e-12
        assert found < error(1.0)


def test_temperatures_before_it_are_fixed_and_rounds_after_it_unread() -> None:
    whole = known_outcomes(rounds=600, scale=2.0, seed=5)
    first = PrefixOutcomes(
        confidence=whole.confidence[:, :2],
        survived=whole.survived[:, :2],
        observed=whole.observed[:, :2],
        prompt=whole.prompt,
    )
    assert fit_sts(first) == fit_sts(whole)[:2]
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    assert fit_sts(whole.select(order)) == pytest.approx(fit_sts(whole), rel=1e-9)
    assert fit_sts(whole) == fit_sts(whole)


def test_rounds_that_did_not_observe_a_proposal_have_no_say_in_it() -> None:
    rounds = known_rounds(rounds=600, proposals=2, scale=2.0, seed=7)
    # The same again, with a schedule that verified the first proposal alone.
    short = [
        dataclasses.replace(each, proposed=1, accepted=min(each.accepted, 1), confidence=each.confidence[:1])
        for each in rounds
    ]
    both = fit_sts(PrefixOutcomes.of([*rounds, *short]), noise=0.0)
    assert both == pytest.approx(fit_sts(PrefixOutcomes.of(rounds), noise=0.0), rel=1e-9)


def test_the_brier_score_decides_within_the_noise() -> None:
    """Few rounds: on others, the fit is better than the smallest error by luck, on average over draws."""
    held = known_outcomes(rounds=8000, proposals=2, scale=2.5, seed=100)

    def error(noise: float) -> float:
        total = 0.0
        for seed in range(5):
            fitted = fit_sts(known_outcomes(rounds=250, proposals=2, scale=2.5, seed=seed), noise=noise)
            total += sum(each.ece for each in calibration_report(held, fitted).positions)
        return total / 10

    assert error(0.5) < error(0.0)


def test_one_where_there_is_nothing_to_fit() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, -1.0, 2.0], [0.5, 1.0, 2.0]], dtype=torch.float64)
    survived = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]]).bool()
    observed = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0]]).bool()
    outcomes = PrefixOutcomes(confidence=logits, survived=survived, observed=observed, prompt=torch.arange(3))
    fitted = fit_sts(outcomes)
    assert (fitted[0], fitted[2]) == (1.0, 1.0), "only survivors; nothing observed"
    assert fitted[1] != 1.0
    rejected = dataclasses.replace(outcomes, survived=torch.zeros(3, 3, dtype=torch.bool))
    assert fit_sts(rejected) == [1.0, 1.0, 1.0]


def test_bounds_are_kept() -> None:
    fitted = fit_sts(known_outcomes(rounds=2000, proposals=2, scale=6.0, seed=6), bounds=(0.5, 2.0))
    assert fitted[0] == pytest.approx(2.0)
    assert max(fitted) <= 2.0 + 1e-12


@pytest.mark.parametrize(
    "settings",
    [
        *({"bounds": bounds} for bounds in ((0.0, 2.0), (1.5, 2.0), (0.5, 0.9), (0.5, math.inf))),
        *({"grid": 2}, {"num_bins": 0}, {"noise": -0.1}, {"noise": math.nan}),
    ],
)
def test_settings_that_make_no_search(settings: dict) -> None:
    with pytest.raises(ConfigError, match="give positive bounds around 1"):
        fit_sts(known_outcomes(rounds=5), **settings)


def test_the_file_of_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    write_sts(path, (1.5, 2), {"seed": 3})
    assert json.loads(path.read_text()) == {"sts_temperatures": [1.5, 2.0], "seed": 3}
    assert read_sts(path) == [1.5, 2.0]
    assert read_sts(path, num_proposals=2) == [1.5, 2.0]
    with pytest.raises(ConfigError, match="2 temperatures, the drafter makes 7 proposals"):
        read_sts(path, num_proposals=7)
    write_sts(path, [0.7])
    assert read_sts(path) == [0.7]
    assert [each.name for each in tmp_path.iterdir()] == ["sts.json"]


@pytest.mark.parametrize("values", ["[]", "[0]", "[-1]", "[true]", '["1"]', "[NaN]", "[Infinity]", "2.0", "null"])
def test_temperatures_that_no_logit_can_be_divided_by(tmp_path: Path, values: str) -> None:
    path = tmp_path / "sts.json"
    path.write_text('{"sts_temperatures": ' + values + "}")
    with pytest.raises(ConfigError, match="positive, finite numbers"):
        read_sts(path)


def test_files_that_hold_none(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    with pytest.raises(ConfigError, match="can't be read"):
        read_sts(path)
    for text, message in (
        ("{", "can't be read as JSON"),
        ("[1.0]", "has no"),
        ('{"temperatures": [1.0]}', "has no"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_sts(path)


def test_what_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    for temperatures, extra in (
        ([], None),
        ([0.0], None),
        ([1.0], {"sts_temperatures": [2.0]}),
        ([1.0], {"ece": math.nan}),
        ([1.0], {"tensor": torch.ones(1)}),
    ):
        with pytest.raises(ConfigError):
            write_sts(path, temperatures, extra)
    with pytest.raises(ConfigError, match="can't be written"):
        write_sts(tmp_path / "nowhere" / "sts.json", [1.0])
    assert not list(tmp_path.iterdir())
