"""The sums of one window and the one message they travel in.

Every rank sends the same float64 vector: a header of :class:`Slot`, then :data:`TERM_WIDTH` slots per extra
term, padded with zeros to a multiple of :data:`MESSAGE_STEP`. The padding is on purpose: ranks that disagree
about the extra terms still send messages of one length, so they get an error that names the cause where
all-reduces of different lengths would hang or corrupt each other.

Numbers that must be *equal* on all ranks are carried as ``(1, h, h*h)`` with ``h`` a 20-bit fingerprint: after
summing, ``n * sum(h*h) == sum(h)**2`` holds exactly when all ``n`` are equal (Cauchy-Schwarz), and every rank
sees the same answer. All of these sums are integers far below 2**53, hence exact.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor

from tokennorm.kit.counts import Count

__all__ = ["MESSAGE_STEP", "TERM_WIDTH", "Slot", "TermSlot", "WindowSums", "agreed", "fingerprint"]


class Slot(IntEnum):
    """Header of the message. The flags count the offences; 0 everywhere is right."""

    LOSS_SUM = 0
    EFFECTIVE = 1
    TOTAL = 2
    BAD_COUNT = 3  # a count on the device was negative, NaN or above 2**53
    EFFECTIVE_ABOVE_TOTAL = 4
    DENOMINATOR_DIFFERS = 5  # deferred: an extra term counted in something else than effective tokens
    ANNOUNCED_DIFFERS = 6  # counted: a rank accumulated something else than it announced
    UNUSED_EXTRA_LOSS = 7
    DIVISOR_AGREEMENT = 8  # three slots
    SETUP_AGREEMENT = 11  # three slots
    # Filled in after the reduction, so that everything becomes Python numbers in one copy.
    GRADIENT_SCALE = 14
    BACKWARD_DIVISOR = 15
    HEADER_END = 16


class TermSlot(IntEnum):
    """Offsets within an extra term's slots."""

    NUM = 0
    DEN = 1
    WEIGHT_AGREEMENT = 2  # three slots


TERM_WIDTH = 5
MESSAGE_STEP = 64


def fingerprint(value: object) -> int:
    """A 20-bit number that is the same in every process for the same ``repr``."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % (1 << 20)


def agreed(message: list[float], slot: int) -> bool:
    """Whether all ranks that wrote an agreement there wrote the same."""
    count, total, squares = (int(value) for value in message[slot : slot + 3])
    return count * squares == total * total


class WindowSums:
    """Exact running sums: Python numbers on the host, 0-d tensors on the device, joined once at the end.

    Adding a tensor is one small kernel and no synchronisation; a number travels as a kernel argument.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._message = torch.zeros(MESSAGE_STEP, dtype=torch.float64, device=device)
        self._host: dict[int, int | float] = {}
        self._terms: dict[str, int] = {}

    @property
    def term_names(self) -> tuple[str, ...]:
        """The extra terms in the order of their slots."""
        return tuple(self._terms)

    def term_slot(self, name: str) -> int:
        """First slot of an extra term, made when the name is new."""
        if name not in self._terms:
            start = Slot.HEADER_END + TERM_WIDTH * len(self._terms)
            self._terms[name] = start
            if start + TERM_WIDTH > self._message.numel():
                self._message = torch.cat([self._message, self._message.new_zeros(MESSAGE_STEP)])
        return self._terms[name]

    def add(self, slot: int, value: Count) -> None:
        """Add a number (exactly) or a 0-d tensor (in float64)."""
        if isinstance(value, Tensor):
            value = value.detach()
            if value.device != self._device:
                # Another card of a model-parallel rank, or the float64 fallback of a device without it.
                value = value.to(self._device, non_blocking=self._device.type != "cpu")
            self._message[slot].add_(value)
        elif value:
            self._host[slot] = self._host.get(slot, 0) + value

    def agree(self, slot: int, value: object) -> None:
        """Write this rank's part of an agreement, once per window."""
        mark = fingerprint(value)
        for offset, part in enumerate((1, mark, mark * mark)):
            self._host[slot + offset] = part

    def flag(self, slot: int, condition: bool | Tensor) -> None:
        """Count an offence: known on the host, or a 0-d boolean tensor read with the rest."""
        self.add(slot, condition if isinstance(condition, Tensor) else int(condition))

    def join(self) -> Tensor:
        """The message: float64 ``[64 * n]`` on the device, host numbers added as kernel arguments."""
        for slot, value in self._host.items():
            self._message[slot].add_(value)
        self._host.clear()
        return self._message
