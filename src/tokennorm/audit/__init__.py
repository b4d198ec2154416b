"""Prove a training loop right, or name what is wrong with it.

Imports nothing of this package's own loss or accounting: what it proves, it proves against a naive reference.
"""

from tokennorm.audit.catalogue import CATALOGUE, Mistake
from tokennorm.audit.compare import SampleWeight, WindowResult
from tokennorm.audit.diagnose import Diagnosis
from tokennorm.audit.layouts import Layout, default_layouts
from tokennorm.audit.loop import assert_token_normalised, audit_loop
from tokennorm.audit.report import AuditReport, LayoutReport, TokenWeights
from tokennorm.audit.samples import Sample, collate, make_samples
from tokennorm.audit.tiny import TinyCausalLM, build_tiny
from tokennorm.audit.token_loss import TokenLoss

__all__ = [
    "CATALOGUE",
    "AuditReport",
    "Diagnosis",
    "Layout",
    "LayoutReport",
    "Mistake",
    "Sample",
    "SampleWeight",
    "TinyCausalLM",
    "TokenLoss",
    "TokenWeights",
    "WindowResult",
    "assert_token_normalised",
    "audit_loop",
    "build_tiny",
    "collate",
    "default_layouts",
    "make_samples",
]
