"""Sources that are read while a run trains: in a bounded memory, in an order that can be made again."""

from __future__ import annotations

from tokennorm.data.streaming.account import SourceAccount
from tokennorm.data.streaming.settings import StreamPart, StreamSettings
from tokennorm.data.streaming.source import StreamSource
from tokennorm.data.streaming.windows import StreamWindows

__all__ = ["SourceAccount", "StreamPart", "StreamSettings", "StreamSource", "StreamWindows"]
