"""Chats and texts -> tokens and loss mask -> batches with exact counts."""

from __future__ import annotations

from tokennorm.data.bad_rows import BadRows
from tokennorm.data.cache import cache_folder, default_cache_folder, encode_cached, encoding_fingerprint
from tokennorm.data.chat import ChatEncoder, EncodedChat
from tokennorm.data.conversation import ROLES, Conversation, Message
from tokennorm.data.dataset import ChatDataset, check_max_length
from tokennorm.data.documents import Document, TextDocument
from tokennorm.data.encoding import (
    DocumentEncoder,
    EncodedDocument,
    EncodeSettings,
    Progress,
    encode_documents,
)
from tokennorm.data.isolation import document_leakage, documents_are_isolated, require_isolated_documents
from tokennorm.data.jsonl import read_jsonl
from tokennorm.data.loader import LoadedWindow, WindowLoader
from tokennorm.data.mixture import MixtureOrder, MixtureSource, parse_mixture
from tokennorm.data.packing import Batch, collate_packed, collate_padded, dummy_batch
from tokennorm.data.plan import MicroBatch, Position, Window, epoch_order, plan_windows, rank_view
from tokennorm.data.prefetch import Prefetch
from tokennorm.data.progress import terminal_progress
from tokennorm.data.pydoc_set import PydocPair, PydocSet, load_pydoc
from tokennorm.data.rows import fill_rate, pack, pack_buffered
from tokennorm.data.sample import IGNORE_INDEX, DatasetStatistics, Sample
from tokennorm.data.sources import SourceRows, read_source
from tokennorm.data.streaming import StreamPart, StreamSettings, StreamSource, StreamWindows
from tokennorm.data.template_date import can_hold_date, read_date, shows_date, with_date
from tokennorm.data.turns import Turn, assistant_turns

__all__ = [
    "IGNORE_INDEX",
    "ROLES",
    "BadRows",
    "Batch",
    "ChatDataset",
    "ChatEncoder",
    "Conversation",
    "DatasetStatistics",
    "Document",
    "DocumentEncoder",
    "EncodeSettings",
    "EncodedChat",
    "EncodedDocument",
    "LoadedWindow",
    "Message",
    "MicroBatch",
    "MixtureOrder",
    "MixtureSource",
    "Position",
    "Prefetch",
    "Progress",
    "PydocPair",
    "PydocSet",
    "Sample",
    "SourceRows",
    "StreamPart",
    "StreamSettings",
    "StreamSource",
    "StreamWindows",
    "TextDocument",
    "Turn",
    "Window",
    "WindowLoader",
    "assistant_turns",
    "cache_folder",
    "can_hold_date",
    "check_max_length",
    "collate_packed",
    "collate_padded",
    "default_cache_folder",
    "document_leakage",
    "documents_are_isolated",
    "dummy_batch",
    "encode_cached",
    "encode_documents",
    "encoding_fingerprint",
    "epoch_order",
    "fill_rate",
    "load_pydoc",
    "pack",
    "pack_buffered",
    "parse_mixture",
    "plan_windows",
    "rank_view",
    "read_date",
    "read_jsonl",
    "read_source",
    "require_isolated_documents",
    "shows_date",
    "terminal_progress",
    "with_date",
]
