"""What the recipes share: models and where they come from."""

from __future__ import annotations

from tokennorm.recipes.common.fetch import EMBEDDED_MODELS, cache_folder, fetch
from tokennorm.recipes.common.models import load_causal_lm, load_tokenizer

__all__ = ["EMBEDDED_MODELS", "cache_folder", "fetch", "load_causal_lm", "load_tokenizer"]
