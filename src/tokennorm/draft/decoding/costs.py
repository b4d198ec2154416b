"""The schedule that is fastest on this machine: what a verification costs by its length, against what it brings.

A forward pass over a few tokens costs little more than one over a single token as long as reading the weights is
what takes the time. Where that ends depends on machine, threads and matrix library, and it can end in a jump. So a
schedule is chosen with measured seconds. The rounds of an earlier decoding say what each number of verified
proposals would have brought: a round that accepted n emits ``min(n, P) + 1`` tokens when P of them are verified.

The estimate leaves out that with another schedule rounds begin at other places. Schedules are compared on it, and
the chosen one is to be measured on other prompts than those that it was chosen with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.decoding.proposals import propose
from tokennorm.draft.decoding.request import check_drafter, make_request
from tokennorm.draft.decoding.rounds import Round
from tokennorm.draft.decoding.schedule import VerificationSchedule
from tokennorm.draft.decoding.target import TargetSteps
from tokennorm.draft.model import DraftModel
from tokennorm.errors import DataError

__all__ = ["DecodeCosts", "ScheduleChoice", "choose_schedule", "measure_costs"]

THRESHOLDS = tuple(step / 20 for step in range(20))


@dataclass(frozen=True, kw_only=True)
class DecodeCosts:
    """Wall seconds of the parts of a round, by size.

    Attributes:
        target_seconds: of a forward pass over 1, 2, ... tokens; the first is plain decoding's.
        draft_seconds: of drafting at most 0, 1, ... proposals; as many as ``target_seconds``.
    """

    target_seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.target_seconds) != len(self.draft_seconds) or not self.target_seconds:
            raise DataError(
                f"{len(self.target_seconds)} target_seconds and {len(self.draft_seconds)} draft_seconds",
                fix="one of each for 0, 1, ... proposals: verifying P of them is a pass over P + 1 tokens.",
            )


@torch.inference_mode()
def measure_costs(
    target: Any, drafter: DraftModel, input_ids: Tensor | Sequence[int], *, repeats: int = 9
) -> DecodeCosts:
    """Time verifications and drafts of every size behind a prompt; medians.

    Args:
        target: a Hugging Face causal LM in eval mode.
        drafter: made for it.
        input_ids: a prompt of typical length, ``[1, S]`` or ``[S]``; attention to it is part of the cost.
        repeats: of each size.

    Raises:
        ConfigError: a target or drafter that can't be decoded with.
        DataError: a prompt that can't be continued.
    """
    most = drafter.config.num_proposals
    request = make_request(
        target, input_ids, max_new_tokens=most + 1, stop_token_ids=(), temperature=0.0, generator=None
    )
    check_drafter(drafter, target)
    steps = TargetSteps(target, drafter.config.target_layer_ids)
    logits, features = steps.feed(request.prompt, last_only=True)
    device = request.prompt.device
    positions = torch.arange(steps.length, device=device).unsqueeze(0)
    context = drafter.context(features, positions)
    anchor = logits.argmax(dim=-1)
    tokens = anchor.expand(most + 1)
    first = drafter.config.first_supervised_slot

    def verify(count: int) -> None:
        steps.feed(tokens[: count + 1])[0].argmax(dim=-1).tolist()
        steps.drop(count + 1)

    def draft(count: int) -> None:
        # A decoder without proposals does not draft; the context grows in any case, by the anchor at least.
        drafter.context(features[:, :1], positions[:, :1])
        if count:
            hidden = drafter.draft_hidden(anchor, positions[:, -1] + 1, context)
            propose(drafter, hidden[:, : first + count], anchor).token_ids.tolist()

    # Sizes in turn, so that a machine that slows down slows them all.
    verified: list[list[float]] = [[] for _ in range(most + 1)]
    drafted: list[list[float]] = [[] for _ in range(most + 1)]
    for _ in range(repeats + 1):
        for count in range(most + 1):
            verified[count].append(_seconds(verify, count, device))
            drafted[count].append(_seconds(draft, count, device))
    # The first of each pays for allocations.
    return DecodeCosts(
        target_seconds=tuple(statistics.median(times[1:]) for times in verified),
        draft_seconds=tuple(statistics.median(times[1:]) for times in drafted),
    )


def _seconds(work: Callable[[int], None], count: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work(count)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """The schedule that costs least per token, and what is expected of it.

    Attributes:
        schedule: ``max_proposals`` 0 where drafting does not pay.
        tau: expected tokens per round.
        mean_verified: expected proposals verified per round.
        speedup: expected, over plain decoding.
        speedup_of_all: expected where everything is verified.
    """

    schedule: VerificationSchedule
    tau: float
    mean_verified: float
    speedup: float
    speedup_of_all: float


def choose_schedule(
    rounds: Iterable[Round], costs: DecodeCosts, *, sts_temperatures: Sequence[float] | None = None
) -> ScheduleChoice:
    """Try thresholds and largest numbers of proposals on recorded rounds; take the least seconds per token.

    Args:
        rounds: decoded without a schedule, at the temperature of the service; of all prompts.
        costs: from :func:`measure_costs`.
        sts_temperatures: of the confidence, from calibration.

    Raises:
        DataError: no rounds, or rounds with more proposals than there are costs.
    """
    rounds = [one for one in rounds if one.proposed]
    most = len(costs.target_seconds) - 1
    if not rounds:
        raise DataError("no rounds with proposals", fix="decode some prompts with the drafter first.")
    if max(one.proposed for one in rounds) > most:
        raise DataError(
            f"rounds of {max(one.proposed for one in rounds)} proposals, and costs of up to {most}",
            fix="measure the costs with the drafter that was decoded with.",
        )
    survival = _survival(rounds, most, sts_temperatures)
    accepted = torch.tensor([one.accepted for one in rounds])
    ended = torch.tensor([one.ended for one in rounds])
    target, drafts = (
        torch.tensor(seconds, dtype=torch.float64) for seconds in (costs.target_seconds, costs.draft_seconds)
    )
    thresholds = THRESHOLDS if rounds[0].confidence is not None else (0.0,)
    best: ScheduleChoice | None = None
    of_all = 0.0
    for limit in range(most + 1):
        for threshold in thresholds if limit else (0.0,):
            verified = (survival[:, :limit] >= threshold).cumprod(dim=1).sum(dim=1)
            # Behind an accepted stop token the target's own token is not wanted.
            emitted = torch.minimum(accepted, verified) + ~(ended & (verified >= accepted))
            seconds = target[verified] + drafts[limit]
            speedup = float(emitted.sum() * target[0] / seconds.sum())
            if limit == most and threshold == 0.0:
                of_all = speedup
            if best is None or speedup > best.speedup:
                best = ScheduleChoice(
                    schedule=VerificationSchedule(
                        threshold=threshold,
                        max_proposals=None if limit == most else limit,
                        sts_temperatures=sts_temperatures if threshold else None,
                    ),
                    tau=float(emitted.double().mean()),
                    mean_verified=float(verified.double().mean()),
                    speedup=speedup,
                    speedup_of_all=0.0,
                )
    assert best is not None
    return ScheduleChoice(**{**vars(best), "speedup_of_all": of_all})


def _survival(rounds: Sequence[Round], most: int, temperatures: Sequence[float] | None) -> Tensor:
    """``[N, P]``, estimated; 1 without confidence, and below every threshold where nothing was proposed."""
    survival = torch.full((len(rounds), most), -1.0, dtype=torch.float64)
    for row, one in zip(survival, rounds, strict=True):
        logits = torch.tensor(one.confidence or [torch.inf] * one.proposed, dtype=torch.float64)
        if temperatures is not None:
            logits = logits / torch.tensor(temperatures[: len(logits)], dtype=torch.float64)
        row[: one.proposed] = logits.sigmoid().cumprod(dim=0)
    return survival
