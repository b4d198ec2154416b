"""What can't be decoded is refused before any forward pass, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draft.decode_toy import VOCAB, drafter_for, lively_target
from tests.draft.drafter_toy import toy_drafter
from tests.draft.targets import tiny_target
from tokennorm.draft import plain_decode, speculative_decode
from tokennorm.errors import ConfigError, DataError


def untouched(target: Any) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward pass was made")

    target.model.register_forward_pre_hook(fail)
    return target


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, DataError, "empty"),
        ([], {}, DataError, "empty"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, DataError, "2 rows"),
        (torch.zeros(1, 1, 3, dtype=torch.int64), {}, DataError, "shape"),
        (torch.zeros(3), {}, DataError, "float32"),
        ([1, VOCAB], {}, DataError, "from 1 to 40"),
        ([-1, 2], {}, DataError, "from -1 to 2"),
        ([1] * 10, {"max_new_tokens": 2**16}, DataError, "65546 positions"),
        ([1], {"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ([1], {"temperature": -0.1}, ConfigError, "temperature"),
        ([1], {"temperature": float("nan")}, ConfigError, "temperature"),
    ],
)
def test_requests_that_cannot_be_decoded(prompt: Any, options: Any, error: Any, message: str) -> None:
    target = untouched(lively_target())
    options = {"max_new_tokens": 4, **options}
    with pytest.raises(error, match=message):
        plain_decode(target, prompt, **options)
    with pytest.raises(error, match=message):
        speculative_decode(target, drafter_for(target), prompt, **options)


def test_the_last_position_can_be_used() -> None:
    target = lively_target("gpt2")
    assert target.config.max_position_embeddings == 64
    drafter = drafter_for(target, intermediate_size=24)
    decoded = speculative_decode(target, drafter, [1] * 50, max_new_tokens=14)
    assert decoded.token_ids == plain_decode(target, [1] * 50, max_new_tokens=14).token_ids
    with pytest.raises(DataError, match="at most 14 new tokens"):
        speculative_decode(target, drafter, [1] * 50, max_new_tokens=15)


def test_drafters_for_another_target() -> None:
    target = untouched(lively_target())
    for drafter, message in (
        (toy_drafter(), "a vocabulary of 31"),
        (drafter_for(target, hidden_size=16, num_target_layers=5), "as many target layers as 5"),
        (drafter_for(target).to("meta"), "on meta"),
    ):
        with pytest.raises(ConfigError, match=message):
            speculative_decode(target, drafter, [1], max_new_tokens=2)


def test_targets_that_cannot_be_verified() -> None:
    with pytest.raises(ConfigError, match="running state"):
        plain_decode(tiny_target("mamba"), [1], max_new_tokens=2)
    with pytest.raises(ConfigError, match="training mode"):
        plain_decode(lively_target().train(), [1], max_new_tokens=2)
    target = untouched(lively_target())
    target.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="changes its logits"):
        plain_decode(target, [1], max_new_tokens=2)


def test_prompts_may_be_tensors_or_lists() -> None:
    target = lively_target()
    expected = plain_decode(target, [3, 1, 4], max_new_tokens=4).token_ids
    for prompt in (torch.tensor([3, 1, 4]), torch.tensor([[3, 1, 4]], dtype=torch.int32), (3, 1, 4)):
        assert plain_decode(target, prompt, max_new_tokens=4).token_ids == expected
