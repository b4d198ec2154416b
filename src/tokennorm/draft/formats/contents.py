"""A drafter's folder as the rules of the servers see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Findings", "Folder", "Server", "Shape", "Verdict"]

Server = Literal["vllm", "sglang", "speculators"]
Verdict = Literal["refuses", "degrades", "notes"]
Findings = Iterator[tuple[Verdict, str]]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What is known of it.

    Attributes:
        values: ``config.json``.
        shapes: of all weights.
        offsets: the values of ``d2t``, where there is one.
        target: the target's configuration, where it is known.
    """

    values: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    offsets: Sequence[int] | None
    target: Mapping[str, Any] | None

    @property
    def nested(self) -> bool:
        """Whether it is in the speculators format."""
        return "speculators_model_type" in self.values

    @property
    def decoder(self) -> Mapping[str, Any]:
        """Where the layers' settings are."""
        return (self.values.get("transformer_layer_config") or {}) if self.nested else self.values

    @property
    def rank(self) -> int:
        """Rank of the Markov head, 0 without one."""
        return int(self.get("markov_rank") or 0)

    @property
    def bonus_anchor(self) -> bool:
        """Whether slot 0 holds the verified anchor."""
        if "dspark_bonus_anchor" in self.values:
            return bool(self.values["dspark_bonus_anchor"])
        return not self.values.get("sample_from_anchor", not self.is_dflash)

    @property
    def is_dflash(self) -> bool:
        """Whether it says to be a DFlash drafter."""
        kind = self.values.get("speculators_model_type")
        return kind == "dflash" or (kind is None and any("DFlash" in name for name in self.architectures))

    @property
    def architectures(self) -> list[str]:
        """As ``config.json`` names them."""
        return [str(name) for name in self.values.get("architectures") or []]

    @property
    def layer_ids(self) -> list[int] | None:
        """In trainer numbers."""
        if self.nested:
            ids = self.values.get("aux_hidden_state_layer_ids")
            return None if ids is None else [int(i) - 1 for i in ids]
        ids = self.get("target_layer_ids")
        return None if ids is None else [int(i) for i in ids]

    def get(self, name: str) -> Any:
        """A drafting setting, wherever the schema keeps it."""
        nested = self.values.get("dflash_config")
        inner = nested if isinstance(nested, Mapping) else {}
        return self.values.get(name, inner.get(name))
