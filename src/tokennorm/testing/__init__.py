"""Helpers for tests: spawn a few gloo ranks on this machine; refuse host synchronisation."""

from tokennorm.testing.no_sync import HostSyncError, RefuseHostSync
from tokennorm.testing.spawn import RankResult, spawn_ranks

__all__ = ["HostSyncError", "RankResult", "RefuseHostSync", "spawn_ranks"]
