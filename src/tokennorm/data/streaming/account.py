"""What became of the rows of one source that is streamed: counted, and refused where too many are bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tokennorm.data.bad_rows import SHOWN_ERRORS, BadRows
from tokennorm.data.encoding import EncodedDocument
from tokennorm.data.sample import DatasetStatistics
from tokennorm.errors import DataError, NoSupervisedTokenError

__all__ = ["SourceAccount"]

# A share of fewer rows says nothing: the first row of a stream can be a bad one.
ROWS_OF_A_SHARE = 1000
_COUNTED = tuple(DatasetStatistics.__dataclass_fields__)


class SourceAccount:
    """Counts of one source, over all passes and in the present one.

    Args:
        where: the source, as it was named.
        bad_rows: what becomes of bad rows. Skipped ones may be its share of the rows so far in the pass, or of
            1,000 where they are fewer; and at the end of a pass, its share of the rows of the pass.
    """

    def __init__(self, where: str, bad_rows: BadRows) -> None:
        self.where, self.bad_rows = where, bad_rows
        self._counts: Counter[str] = Counter()
        self._shown: list[str] = []
        self._pass, self._rows, self._bad, self._samples = 0, 0, 0, 0

    @property
    def statistics(self) -> DatasetStatistics:
        """All passes together."""
        return DatasetStatistics(**{name: self._counts[name] for name in _COUNTED})

    def add(self, document: EncodedDocument, pass_number: int) -> list[str]:
        """Count a row; return sentences that a user should read.

        Raises:
            DataError: a bad row that can't be let pass, or (NoSupervisedTokenError) a whole pass without a sample.
        """
        said: list[str] = []
        if pass_number > self._pass:
            self.end_pass()
            if (pass_number + 1).bit_count() == 1:  # 2, 4, 8, ...: a small source would fill the terminal
                said.append(
                    f"pass {pass_number + 1} over {self.where} begins, after {self._samples:,} samples of "
                    f"{self._rows:,} rows"
                )
            self._pass, self._rows, self._bad, self._samples = pass_number, 0, 0, 0
        self._rows += 1
        self._samples += len(document.pieces)
        self._counts.update(
            num_conversations=1,
            num_samples=len(document.pieces),
            num_dropped=int(not document.pieces and document.error is None),
            num_truncated=document.truncated,
            num_without_end=int(document.without_end),
            num_special_text=int(document.special_text),
            supervised_tokens=sum(int(mask[1:].sum()) for _, mask in document.pieces),
            total_tokens=sum(len(ids) for ids, _ in document.pieces),
            lost_supervised_tokens=document.lost,
            num_bad=int(document.error is not None),
        )
        if document.error is not None:
            said += self._bad_row(document.error)
        return said

    def end_pass(self) -> None:
        """Check the pass that is over; for callers that know that no further row comes.

        Raises:
            DataError: too many bad rows, or (NoSupervisedTokenError) no sample.
        """
        if self._bad:
            self._check_share(self._rows, f"{self._rows:,}")
        if not self._samples:
            raise NoSupervisedTokenError(
                f"no supervised token in all {self._rows:,} rows of {self.where}",
                why="there is nothing to train on, and the stream would be read for ever",
                fix="check that the assistant's messages are there, and raise max_length if they begin beyond it",
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "pass": [self._pass, self._rows, self._bad, self._samples],
            "counts": dict(self._counts),
            "shown": list(self._shown),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._pass, self._rows, self._bad, self._samples = state["pass"]
        self._counts, self._shown = Counter(state["counts"]), list(state["shown"])

    def _bad_row(self, error: DataError) -> list[str]:
        if self.bad_rows.action == "error":
            raise error
        self._bad += 1
        said: list[str] = []
        if len(self._shown) < SHOWN_ERRORS:
            self._shown.append(error.what)
            said.append(f"a bad row is left out: {error.what}")
        self._check_share(max(self._rows, ROWS_OF_A_SHARE), f"the first {self._rows:,}", error)
        return said

    def _check_share(self, rows: int, words: str, last: DataError | None = None) -> None:
        share = self.bad_rows.max_share
        if self._bad <= share * rows:
            return
        named = dict.fromkeys([*self._shown, *([] if last is None else [last.what])])
        raise DataError(
            f"{self._bad} bad rows of {words} in {self.where}, more than the share {share:g} that is let pass:\n"
            + "\n".join(f"  {what}" for what in named),
            why=None if last is None else last.why,
            fix="correct or remove these rows, or raise the share",
        )
