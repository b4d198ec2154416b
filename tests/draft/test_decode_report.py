"""Reports against counts by hand; outputs that differ are a tie only where the target can't tell tokens apart."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.draft.decode_toy import drafter_for, lively_target, prompts
from tokennorm.draft import (
    Decoded,
    DecodeGroup,
    DecodeReport,
    Difference,
    Round,
    compare_outputs,
    compare_reports,
    explain_difference,
    plain_decode,
    speculative_decode,
)
from tokennorm.draft.decoding.figures import bootstrap_interval
from tokennorm.errors import DataError, MissingDependencyError


def decoded(
    tokens: tuple[int, ...], rounds: list[tuple[int, int, bool]], seconds: float, **parts: float
) -> Decoded:
    """Rounds as (proposed, accepted, ended)."""
    return Decoded(
        token_ids=tokens,
        rounds=tuple(
            Round(proposed=p, accepted=a, emitted=a + (not ended), ended=ended, confidence=None)
            for p, a, ended in rounds
        ),
        seconds=seconds,
        prefill_seconds=parts.get("prefill", 1.0),
        target_seconds=parts.get("target", 0.0),
        draft_seconds=parts.get("draft", 0.0),
    )


def by_hand() -> list[tuple[Decoded, Decoded]]:
    """Two prompts: 1 + (3 + 1) + (0 + 1) + (2 + 1) tokens, and 1 + (1 + 1) + 2 whose last is an accepted end."""
    first = tuple(range(9))
    second = tuple(range(5))
    return [
        (
            decoded(first, [], 16.0, target=16.0),
            decoded(first, [(3, 3, False), (3, 0, False), (2, 2, False)], 6.0, target=4.0, draft=1.5),
        ),
        (
            decoded(second, [], 8.0, target=8.0),
            decoded(second, [(3, 1, False), (3, 2, True)], 4.0, target=2.0, draft=1.0),
        ),
    ]


def test_numbers_are_those_counted_by_hand() -> None:
    group = DecodeGroup.of("tables", by_hand())
    assert (group.tokens, group.rounds, len(group.prompts)) == (14, 5, 2)
    assert group.tau == 12 / 5
    assert group.tau_drafted == 8 / 5
    assert group.mean_verified == 14 / 5
    assert group.accepted_lengths == (1, 1, 2, 1)
    # The third proposal: by the first round alone. The fifth ended with an accepted stop token before it.
    assert group.reached == (5, 4, 1)
    assert group.acceptance == (4 / 5, 3 / 4, 1.0)
    assert group.survival == (4 / 5, 3 / 5, 1 / 5)
    assert sum(group.survival) == pytest.approx(group.tau_drafted)
    assert group.speedup == 24 / 10
    assert group.speedup_with_prefill == 26 / 12
    assert group.plain_tokens_per_second == 12 / 24
    assert group.tokens_per_second == 12 / 10
    assert group.milliseconds_per_token == {
        "plain": 2000,
        "target": 500,
        "drafter": pytest.approx(2500 / 12),
        "other": pytest.approx(1500 / 12),
    }
    assert group.milliseconds_per_round == {"target": 1200, "drafter": 500}
    assert (group.identical, group.ties, group.different) == (2, 0, 0)


def test_rounds_without_proposals_and_answers_without_rounds() -> None:
    tokens = (1, 2)
    alone = decoded((1,), [], 0.0)
    group = DecodeGroup.of("short", [(decoded(tokens, [], 1.0), decoded(tokens, [(0, 0, False)], 1.0))])
    assert (group.tau, group.accepted_lengths, group.acceptance, group.survival) == (1.0, (1,), (), ())
    nothing = DecodeGroup.of("one token", [(alone, alone)])
    assert (nothing.tau, nothing.speedup, nothing.acceptance, nothing.tau_interval) == (None, None, (), None)
    report = DecodeReport(groups=(group, nothing))
    assert "-" in report.table()
    assert json.loads(report.to_json())["groups"][1]["summary"]["tau"] is None
    with pytest.raises(DataError, match="no prompts"):
        DecodeGroup.of("none", [])


def test_outputs_of_different_length_are_compared_by_token() -> None:
    plain, fast = by_hand()[0]
    shorter = dataclasses.replace(fast, token_ids=fast.token_ids[:5], rounds=fast.rounds[:1], seconds=2.0)
    group = DecodeGroup.of("cut", [(plain, shorter, Difference(position=4, margin=1e-5, is_tie=True))])
    assert group.speedup == (16 / 8) / (2 / 4)
    assert (group.identical, group.ties, group.different) == (0, 1, 0)
    assert DecodeGroup.of("cut", [(plain, shorter)]).different == 1


def test_intervals_cover_a_ratio_and_are_the_same_every_time() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        rounds = torch.randint(5, 15, (30,), generator=generator).double()
        tokens = rounds * 2 + 5 * torch.randn(30, generator=generator, dtype=torch.float64)
        columns = [tokens.tolist(), rounds.tolist()]
        interval = bootstrap_interval(columns, lambda sums: sums[0] / sums[1])
        assert interval is not None
        low, high = interval
        covered += low <= 2 <= high
    assert 180 <= covered <= 198
    assert bootstrap_interval(columns, lambda sums: sums[0] / sums[1]) == interval
    assert bootstrap_interval(columns, lambda sums: sums[0] / sums[1], seed=1) != interval
    assert bootstrap_interval([[1.0], [2.0]], lambda sums: sums[0] / sums[1]) is None


def report_by_hand() -> DecodeReport:
    first, second = by_hand()
    return DecodeReport.of([("tables", *first), ("talk", *second), ("tables", *second)])


def test_a_report_survives_json() -> None:
    report = report_by_hand()
    assert [group.name for group in report.groups] == ["tables", "talk"]
    assert len(report.group("tables").prompts) == 2
    assert report.overall.tokens == 19
    again = DecodeReport.from_json(report.to_json())
    assert again == report
    assert again.overall.summary() == report.overall.summary()
    with pytest.raises(DataError, match="tables, talk"):
        report.group("code")
    for text in ("{}", "[]", "no", '{"format": 1, "groups": [{}]}'):
        with pytest.raises(DataError, match="no decode report"):
            DecodeReport.from_json(text)
    with pytest.raises(DataError, match="format 7"):
        DecodeReport.from_json('{"format": 7}')


def test_tables_hold_the_numbers_in_columns() -> None:
    report = report_by_hand()
    text = report.table()
    assert max(len(line) for line in text.splitlines()) < 120
    (row,) = [line for line in text.splitlines() if line.startswith("tables") and "14" in line]
    assert row.split() == ["tables", "2", "14", "5", "2.40", "2.00", "to", "2.67", "1.60", "2.80"]
    assert sum(line.startswith("all") for line in text.splitlines()) == 5
    markdown = report.markdown()
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    for first, line in itertools.pairwise(rows):
        if set(line) <= set("|-: "):
            assert first.count("|") == line.count("|")
    assert "| tables | 2 | 14 | 5 | 2.40 |" in markdown


def test_reports_stand_side_by_side() -> None:
    plain, fast = by_hand()[0]
    slow = decoded(fast.token_ids, [(3, 0, False)] * 8, 20.0, target=15.0, draft=4.0)
    before = DecodeReport.of([("tables", plain, slow)])
    both = compare_reports({"untrained": before, "trained": report_by_hand()})
    assert [(name, title) for name, title, _ in both.series()] == [
        ("tables", "untrained"),
        ("tables", "trained"),
        ("talk", "trained"),
        ("all", "untrained"),
        ("all", "trained"),
    ]
    lines = both.table().splitlines()
    assert any(line.split()[:2] == ["tables", "untrained"] and " 1.00 " in line for line in lines)
    assert "| tables | trained |" in both.markdown()
    for wrong in ({}, {"a": DecodeReport(groups=())}):
        with pytest.raises(DataError, match="nothing to compare"):
            compare_reports(wrong)


def test_plots_are_drawn(tmp_path: Path) -> None:
    report = report_by_hand()
    report.plot(tmp_path / "one.png")
    compare_reports({"untrained": report, "trained": report}).plot(tmp_path / "two.svg")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "two.svg").read_text()
    assert text.count("<svg") == 1
    assert len(text) > 20_000


def test_without_matplotlib_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r"tokennorm\[draft\]"):
        report_by_hand().plot(tmp_path / "none.png")


def test_a_tie_is_a_tie_of_the_target() -> None:
    target = lively_target(dtype=torch.float32)
    (prompt,) = prompts(1)
    answer = plain_decode(target, prompt, max_new_tokens=10).token_ids
    assert explain_difference(target, prompt, answer, answer) is None
    other = (answer[4] + 1) % 39
    wrong = (*answer[:4], other, *answer[5:])
    found = explain_difference(target, prompt, answer, wrong)
    assert found is not None
    assert found.position == 4
    assert not found.is_tie
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([[*prompt[0].tolist(), *answer[:4]]])).logits[0, -1]
    assert found.margin == pytest.approx(float(logits.max() - logits[other]), rel=1e-4)
    # The head gives both tokens nearly the same logit: now either is the target's own.
    with torch.no_grad():
        target.lm_head.weight[other] = target.lm_head.weight[answer[4]] * (1 - 1e-6)
    assert plain_decode(target, prompt, max_new_tokens=5).token_ids[:4] == answer[:4]
    tie = explain_difference(target, prompt, answer, wrong)
    assert tie is not None
    assert tie.is_tie
    assert tie.margin < 1e-3
    # Two tokens that are as good as each other, and both bad, are no tie.
    worst = int(logits.argmin())
    with torch.no_grad():
        target.lm_head.weight[(worst + 1) % 39] = target.lm_head.weight[worst]
    pair = ((*answer[:4], worst), (*answer[:4], (worst + 1) % 39))
    bad = explain_difference(target, prompt, *pair)
    assert bad is not None
    assert not bad.is_tie
    short = explain_difference(target, prompt, answer, answer[:7])
    assert short == Difference(position=7, margin=math.inf, is_tie=False)


def test_outputs_of_many_prompts_are_compared() -> None:
    target = lively_target()
    drafter = drafter_for(target)
    asked = prompts(3)
    plain = [plain_decode(target, prompt, max_new_tokens=8) for prompt in asked]
    fast = [speculative_decode(target, drafter, prompt, max_new_tokens=8) for prompt in asked]
    compared = compare_outputs(target, asked, plain, fast)
    assert (compared.identical, compared.ties, compared.different) == (3, 0, 0)
    swapped = compare_outputs(target, asked, plain, [fast[1], fast[0], fast[2]])
    assert (swapped.identical, swapped.different) == (1, 2)
    assert str(swapped) == "1 of 3 outputs identical, 0 ties, 2 different"
    report = DecodeReport.of(
        ("any", *pair, one) for *pair, one in zip(plain, fast, compared.differences, strict=True)
    )
    assert report.groups[0].identical == 3
    with pytest.raises(DataError, match="2 prompts"):
        compare_outputs(target, asked[:2], plain, fast)
