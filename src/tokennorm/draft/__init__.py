"""Drafters for speculative decoding: the DSpark loss, from full logits or fused from hidden states; the drafter
itself, its anchors and masks, the target's hidden states, and the formats of the servers.
"""

from tokennorm.draft.anchors import (
    AnchorRule,
    Anchors,
    anchor_generator,
    document_ids,
    sample_anchors,
    supervised_tokens,
    valid_anchors,
)
from tokennorm.draft.blocks import Blocks, make_blocks
from tokennorm.draft.calibration.metrics import (
    CalibrationMetrics,
    CalibrationReport,
    calibration_metrics,
    calibration_report,
)
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.calibration.result import CalibrationResult, calibrate
from tokennorm.draft.calibration.sts import fit_sts, read_sts, write_sts
from tokennorm.draft.checks import raise_pending_slot_errors
from tokennorm.draft.common import DSparkForwardOutput, teacher_positions
from tokennorm.draft.config import DraftConfig
from tokennorm.draft.context import ContextKV
from tokennorm.draft.decoding.compare import Difference, OutputComparison, compare_outputs, explain_difference
from tokennorm.draft.decoding.costs import DecodeCosts, ScheduleChoice, choose_schedule, measure_costs
from tokennorm.draft.decoding.group import DecodeGroup
from tokennorm.draft.decoding.plain import plain_decode
from tokennorm.draft.decoding.proposals import Proposal, propose
from tokennorm.draft.decoding.report import DecodeReport
from tokennorm.draft.decoding.rounds import Decoded, Round
from tokennorm.draft.decoding.schedule import VerificationSchedule
from tokennorm.draft.decoding.speculative import speculative_decode
from tokennorm.draft.decoding.tables import ReportComparison, compare_reports
from tokennorm.draft.flops import DrafterFlops, drafter_flops
from tokennorm.draft.formats.export import WarmStart, export_drafter, load_drafter, warm_start
from tokennorm.draft.formats.validate import Finding, FolderReport, validate_folder
from tokennorm.draft.forward import DraftForward
from tokennorm.draft.layer_ids import default_layer_ids, layer_ids_from_server, layer_ids_to_server
from tokennorm.draft.loss import compute_dspark_loss
from tokennorm.draft.model import DraftModel
from tokennorm.draft.objective import DSparkSums, dspark_objective
from tokennorm.draft.plan import SlotPlan, plan_slots
from tokennorm.draft.states.cache import (
    CachedDocument,
    HiddenStateCache,
    collate_log_totals,
    collate_states,
    describe_size,
    fill_cache,
)
from tokennorm.draft.states.capture import Captured, HiddenStateCapture
from tokennorm.draft.states.spec import CacheSpec
from tokennorm.draft.target import init_from_target, target_weights
from tokennorm.draft.vocabulary import DraftVocabulary, reduce_output
from tokennorm.draft.vocabulary_choice import frequent_tokens

__all__ = [
    "AnchorRule",
    "Anchors",
    "Blocks",
    "CacheSpec",
    "CachedDocument",
    "CalibrationMetrics",
    "CalibrationReport",
    "CalibrationResult",
    "Captured",
    "ContextKV",
    "DSparkForwardOutput",
    "DSparkSums",
    "DecodeCosts",
    "DecodeGroup",
    "DecodeReport",
    "Decoded",
    "Difference",
    "DraftConfig",
    "DraftForward",
    "DraftModel",
    "DraftVocabulary",
    "DrafterFlops",
    "Finding",
    "FolderReport",
    "HiddenStateCache",
    "HiddenStateCapture",
    "OutputComparison",
    "PrefixOutcomes",
    "Proposal",
    "ReportComparison",
    "Round",
    "ScheduleChoice",
    "SlotPlan",
    "VerificationSchedule",
    "WarmStart",
    "anchor_generator",
    "calibrate",
    "calibration_metrics",
    "calibration_report",
    "choose_schedule",
    "collate_log_totals",
    "collate_states",
    "compare_outputs",
    "compare_reports",
    "compute_dspark_loss",
    "default_layer_ids",
    "describe_size",
    "document_ids",
    "drafter_flops",
    "dspark_objective",
    "explain_difference",
    "export_drafter",
    "fill_cache",
    "fit_sts",
    "frequent_tokens",
    "init_from_target",
    "layer_ids_from_server",
    "layer_ids_to_server",
    "load_drafter",
    "make_blocks",
    "measure_costs",
    "plain_decode",
    "plan_slots",
    "propose",
    "raise_pending_slot_errors",
    "read_sts",
    "reduce_output",
    "sample_anchors",
    "speculative_decode",
    "supervised_tokens",
    "target_weights",
    "teacher_positions",
    "valid_anchors",
    "validate_folder",
    "warm_start",
    "write_sts",
]
