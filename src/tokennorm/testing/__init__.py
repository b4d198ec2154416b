"""Helpers for distributed tests: spawn a few gloo ranks on this machine, with a timeout."""

from tokennorm.testing.spawn import RankResult, spawn_ranks

__all__ = ["RankResult", "spawn_ranks"]
