"""The audit of our own recipes and of other people's trainers, as ``tokennorm audit`` runs it."""

from __future__ import annotations

from tokennorm.recipes.audit.sft import audit_sft

__all__ = ["audit_sft"]
