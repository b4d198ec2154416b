"""Chats -> tokens and loss mask -> batches with exact counts."""

from __future__ import annotations

from tokennorm.data.chat import ChatEncoder, EncodedChat
from tokennorm.data.conversation import ROLES, Conversation, Message
from tokennorm.data.dataset import (
    IGNORE_INDEX,
    ChatDataset,
    DatasetStatistics,
    Progress,
    Sample,
    check_max_length,
)
from tokennorm.data.isolation import document_leakage, documents_are_isolated, require_isolated_documents
from tokennorm.data.jsonl import read_jsonl
from tokennorm.data.loader import LoadedWindow, WindowLoader
from tokennorm.data.packing import Batch, collate_packed, collate_padded, dummy_batch, pack
from tokennorm.data.plan import MicroBatch, Position, Window, epoch_order, plan_windows, rank_view
from tokennorm.data.progress import terminal_progress
from tokennorm.data.pydoc_set import PydocPair, PydocSet, load_pydoc
from tokennorm.data.turns import Turn, assistant_turns

__all__ = [
    "IGNORE_INDEX",
    "ROLES",
    "Batch",
    "ChatDataset",
    "ChatEncoder",
    "Conversation",
    "DatasetStatistics",
    "EncodedChat",
    "LoadedWindow",
    "Message",
    "MicroBatch",
    "Position",
    "Progress",
    "PydocPair",
    "PydocSet",
    "Sample",
    "Turn",
    "Window",
    "WindowLoader",
    "assistant_turns",
    "check_max_length",
    "collate_packed",
    "collate_padded",
    "document_leakage",
    "documents_are_isolated",
    "dummy_batch",
    "epoch_order",
    "load_pydoc",
    "pack",
    "plan_windows",
    "rank_view",
    "read_jsonl",
    "require_isolated_documents",
    "terminal_progress",
]
