"""Drafters for speculative decoding: the DSpark loss, from full logits or fused from hidden states."""

from tokennorm.draft.checks import NonFiniteSlotError, raise_pending_slot_errors
from tokennorm.draft.common import DSparkForwardOutput, teacher_positions
from tokennorm.draft.loss import compute_dspark_loss
from tokennorm.draft.objective import DSparkSums, dspark_objective
from tokennorm.draft.plan import SlotPlan, plan_slots
from tokennorm.draft.vocabulary import DraftVocabulary, reduce_output

__all__ = [
    "DSparkForwardOutput",
    "DSparkSums",
    "DraftVocabulary",
    "NonFiniteSlotError",
    "SlotPlan",
    "compute_dspark_loss",
    "dspark_objective",
    "plan_slots",
    "raise_pending_slot_errors",
    "reduce_output",
    "teacher_positions",
]
