"""One window, from both sides: what the loop's optimizer read, and the gradients of every sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.audit.jobs import flatten
from tokennorm.audit.layouts import Layout
from tokennorm.audit.observe import ClipRecord, WindowRecord
from tokennorm.audit.reference import ExtraGradient, ReferenceResult, WindowKey

__all__ = ["Evidence", "Group", "expected_after_clipping", "undo_own_clipping", "window_evidence"]

# Below this the ranks hold the same gradient; all-reduce gives every rank the same bits, but gathers may not.
_SAME = 1e-5
# Not ours: torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6, and what it did is to be reproduced here.
_TORCH_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tokens whose weight is solved together: a segment of a sample, in its place in the window."""

    rank: int
    micro_batch: int
    sample: int
    segment: int


@dataclass(kw_only=True)
class Evidence:
    """What is known about one window. P is the number of parameters, n of groups.

    Args:
        layout: and ``window``, its number in it.
        optimizer_read: ``[R, P]``, what each rank's optimizer read.
        observed: ``[R, P]``, the same before clipping; where the loop scaled after clipping, with that scale.
        clip: the loop's last clipping by norm, if it has one.
        scaled_after_clipping: what the loop multiplied the clipped gradients by; None if it left them alone.
        groups: and their ``counts`` [n] (due weight), ``losses`` [n], ``gradients`` [n, P], ``parts`` by name.
        extras: by name, ``[rank][micro-batch]``.
        reference: ``[P]``, and ``reference_loss``; ``reference_token_loss`` is without the extras.
        floor: relative error of the definition itself in the loop's dtype.
        missing: parameters that had no gradient on some rank though the reference has one.
        steps: how often the optimizer stepped.
    """

    layout: Layout
    window: int
    optimizer_read: Tensor
    observed: Tensor
    clip: ClipRecord | None
    scaled_after_clipping: float | None
    groups: list[Group]
    counts: Tensor
    losses: Tensor
    gradients: Tensor
    parts: dict[str, Tensor]
    extras: dict[str, list[list[ExtraGradient]]]
    reference: Tensor
    reference_loss: float
    reference_token_loss: float
    floor: float
    missing: tuple[str, ...]
    steps: int
    logged: list[dict[str, float]]
    changed_keys: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """R."""
        return self.layout.ranks

    @property
    def micro_batches(self) -> int:
        """M, on each rank of this window."""
        return len(self.layout.windows[self.window][0])

    @property
    def due(self) -> float:
        """D: the sum of all token weights of the window."""
        return float(self.counts.sum())

    @property
    def disagreement(self) -> float:
        """Largest relative difference between the gradients of two ranks."""
        first = self.observed[0]
        return max(
            (float((o - first).norm() / first.norm().clamp_min(1e-300)) for o in self.observed), default=0.0
        )

    @property
    def ranks_agree(self) -> bool:
        """Whether every rank's optimizer read the same."""
        return self.disagreement <= _SAME

    @property
    def finite(self) -> bool:
        """Whether the loop's gradient is finite on every rank."""
        return bool(torch.isfinite(self.optimizer_read).all() and torch.isfinite(self.observed).all())


def window_evidence(
    layouts: Sequence[Layout],
    key: WindowKey,
    records: Sequence[WindowRecord],
    state: int,
    result: ReferenceResult,
    shapes: dict[str, tuple[int, ...]],
) -> Evidence:
    """Put the records of all ranks and the reference of one window together."""
    layout = layouts[key[0]]
    groups, counts, losses, gradients, in_dtype = [], [], [], [], []
    parts: dict[str, list[Tensor]] = {}
    for rank, micro_batches in enumerate(layout.windows[key[1]]):
        for place, numbers in enumerate(micro_batches):
            for number in numbers:
                sample = result.samples[state, number]
                in_dtype.append(sample.gradient_in_dtype)
                groups.extend(
                    Group(rank=rank, micro_batch=place, sample=number, segment=segment)
                    for segment in range(len(sample.counts))
                )
                counts.append(sample.counts)
                losses.append(sample.losses)
                gradients.append(sample.gradients)
                for name, part in sample.parts.items():
                    parts.setdefault(name, []).append(part)
    all_counts, all_losses, all_gradients = torch.cat(counts), torch.cat(losses), torch.cat(gradients)
    due = all_counts.sum()
    extras = result.extras.get(key, {})
    reference = all_gradients.sum(0) / due if due > 0 else torch.zeros(all_gradients.shape[1]).double()
    loss = token_loss = float(all_losses.sum() / due) if due > 0 else 0.0
    floor = float((torch.stack(in_dtype).sum(0) / due - reference).norm() / reference.norm()) if due > 0 else 0.0
    for rows in extras.values():
        weights = extra_weights(rows, groups, all_counts)
        flat = [extra for row in rows for extra in row]
        if weights.sum() > 0:
            share = weights.flatten() / weights.sum()
            reference = reference + (share[:, None] * torch.stack([e.gradient for e in flat])).sum(0)
            loss += float((share * torch.tensor([e.value for e in flat], dtype=torch.float64)).sum())

    steps = [record.steps for record in records]
    read = torch.stack([flatten(step[-1] if step else {}, shapes) for step in steps])
    clip = records[0].clips[-1] if records[0].clips else None
    observed, scale = _before_clipping(read, records, shapes)
    absent = {name for s in steps for name, value in (s[-1] if s else {}).items() if value is None}
    absent |= {name for name in shapes for s in steps if s and name not in s[-1]}
    return Evidence(
        layout=layout,
        window=key[1],
        optimizer_read=read,
        observed=observed,
        clip=clip,
        scaled_after_clipping=scale,
        groups=groups,
        counts=all_counts,
        losses=all_losses,
        gradients=all_gradients,
        parts={name: torch.cat(pieces) for name, pieces in parts.items()},
        extras=extras,
        reference=reference,
        reference_loss=loss,
        reference_token_loss=token_loss,
        floor=floor,
        missing=_really_missing(absent, reference, shapes),
        steps=len(steps[0]),
        logged=[record.logged for record in records],
        changed_keys=tuple(sorted({key for record in records for key in record.changed_keys})),
    )


def extra_weights(rows: list[list[ExtraGradient]], groups: Sequence[Group], counts: Tensor) -> Tensor:
    """The declared weights ``[R, M]`` of an extra: its own, or the supervised tokens of its micro-batch."""
    tokens = torch.zeros(len(rows), len(rows[0]), dtype=torch.float64)
    for group, count in zip(groups, counts.tolist(), strict=True):
        tokens[group.rank, group.micro_batch] += count
    for rank, row in enumerate(rows):
        for place, extra in enumerate(row):
            if extra.weight is not None:
                tokens[rank, place] = extra.weight
    return tokens


def expected_after_clipping(reference: Tensor, clip: ClipRecord | None) -> Tensor:
    """The reference ``[P]`` as the loop's own clipping would leave it."""
    if clip is None:
        return reference
    norm = torch.linalg.vector_norm(reference, clip.norm_type)
    return reference * min(1.0, clip.max_norm / (float(norm) + _TORCH_CLIP_EPSILON))


def undo_own_clipping(windows: Sequence[Evidence]) -> float | None:
    """Recognise a right gradient that the loop clips with code of its own, and undo it; the norm that it clips to.

    Gradients of the same norm in several windows, each a multiple of its reference, are no coincidence.
    """
    seen = [e for e in windows if e.clip is None and e.finite and e.due > 0 and e.observed.any()]
    norms = [float(e.observed[0].norm()) for e in seen]
    limit = max(norms, default=0.0)
    at_limit = [e for e, norm in zip(seen, norms, strict=True) if norm > (1 - _SAME) * limit]
    if len(seen) < len(windows) or len({id(e.layout) for e in at_limit}) < 2:
        return None
    scales = [min(1.0, limit / float(e.reference.norm())) for e in seen]
    if all(scale == 1.0 for scale in scales) or any(
        (row - scale * e.reference).norm() > _SAME * row.norm()
        for e, scale in zip(seen, scales, strict=True)
        for row in e.observed
    ):
        return None
    for e, scale in zip(seen, scales, strict=True):
        e.observed = e.observed / scale
        e.clip = ClipRecord(
            max_norm=limit, norm_type=2.0, total_norm=float(e.observed[0].norm()), gradients_before={}
        )
    return limit


def _before_clipping(
    read: Tensor, records: Sequence[WindowRecord], shapes: dict[str, tuple[int, ...]]
) -> tuple[Tensor, float | None]:
    """Undo the clipping: ``[R, P]``, and the factor by which the loop scaled what it had clipped, if it did."""
    if not all(record.clips for record in records):
        return read, None
    before = torch.stack([flatten(record.clips[-1].gradients_before, shapes) for record in records])
    clip = records[0].clips[-1]
    clipped = before * min(1.0, clip.max_norm / (clip.total_norm + _TORCH_CLIP_EPSILON))
    square = (clipped * clipped).sum()
    if not torch.isfinite(clipped).all() or square == 0:
        return read, None
    scale = float((read * clipped).sum() / square)
    if (read - scale * clipped).norm() > _SAME * read.norm():
        return read, None  # something else happened after clipping: only what the optimizer read is certain
    if abs(scale - 1) <= _SAME:
        return before, None
    active = clip.max_norm < clip.total_norm
    return scale * before, scale if active else None


def _really_missing(absent: set[str], reference: Tensor, shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    place, missing = 0, []
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        if name in absent and reference[place : place + size].norm() > _SAME * reference.norm():
            missing.append(name)
        place += size
    return tuple(missing)
