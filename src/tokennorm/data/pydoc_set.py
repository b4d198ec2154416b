"""``pydoc``: question-answer pairs from the docstrings of the running Python's standard library.

Real text of very uneven length that every machine already has, so that training can be shown without a
network. The sources are parsed, never imported. The set depends on the Python version alone; its count and
hash say which one it is.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokennorm.data.conversation import Conversation
from tokennorm.errors import DataError

__all__ = ["PydocPair", "PydocSet", "load_pydoc"]

MIN_CHARACTERS = 50
MAX_CHARACTERS = 6_000
HELD_OUT_PERCENT = 15
# Tests and bundled tools; distutils is gone from Python 3.12 on; the docstrings of encodings and of the
# generated lib2to3 tables are one text with another name in it, which would leak into the held-out part.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "turtledemo", "ensurepip", "pydoc_data"}
    | {"lib2to3", "distutils", "encodings"}
)
QUESTIONS = {
    "module": (
        "What is the Python module `{name}` for?",
        "Describe the standard library module `{name}`.",
        "When would I use Python's `{name}` module?",
    ),
    "class": (
        "What is the class `{name}` in Python?",
        "Explain the Python class `{name}`.",
        "What is `{name}` used for in Python?",
    ),
    "function": (
        "What does `{name}` do in Python?",
        "Explain the Python function `{name}`.",
        "How does `{name}` work in Python?",
    ),
    "method": (
        "What does the method `{name}` do in Python?",
        "Explain the Python method `{name}`.",
        "What does `{name}` do?",
    ),
}


@dataclass(frozen=True, kw_only=True)
class PydocPair:
    """One documented name: its kind (module, class, function, method), a question about it and its docstring."""

    name: str
    kind: str
    question: str
    answer: str

    @property
    def conversation(self) -> Conversation:
        """The pair as a chat of two messages."""
        messages = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
        return Conversation(messages=messages, source=f"pydoc:{self.name}")


@dataclass(frozen=True)
class PydocSet:
    """The pairs, split by name; no answer of the one part stands in the other."""

    train: tuple[PydocPair, ...]
    held_out: tuple[PydocPair, ...]

    @property
    def count(self) -> int:
        """Number of pairs in both parts."""
        return len(self.train) + len(self.held_out)

    @cached_property
    def sha256(self) -> str:
        """Hash of every question, every answer and the split."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for pair in part:
                digest.update(json.dumps([pair.name, pair.question, pair.answer]).encode() + b"\n")
            digest.update(b"--\n")
        return digest.hexdigest()

    def describe(self) -> str:
        """One line with the counts and the beginning of the hash."""
        return (
            f"pydoc: {self.count:,} pairs ({len(self.train):,} train, {len(self.held_out):,} held out), "
            f"sha256 {self.sha256[:16]}"
        )


def load_pydoc(root: str | os.PathLike[str] | None = None) -> PydocSet:
    """Parse the standard library (about 3 seconds, nothing cached) and split its docstrings by name.

    About 15 % of the names are held out, chosen by a hash of the qualified name, so that a name stays in its
    part when other names come and go. Texts that differ only in case, spaces and punctuation count as one:
    the first name in order keeps it.

    Args:
        root: folder of the library's sources; by default that of the running Python.

    Raises:
        DataError: there are no sources (some distributions ship compiled files only).
    """
    root = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))
    names: set[str] = set()
    texts: set[str] = set()
    train: list[PydocPair] = []
    held_out: list[PydocPair] = []
    for name, kind, answer in _docstrings(root):
        text = "".join(character for character in answer.casefold() if character.isalnum())
        if not MIN_CHARACTERS <= len(answer) <= MAX_CHARACTERS or name in names or text in texts:
            continue
        names.add(name)
        texts.add(text)
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        forms = QUESTIONS[kind]
        question = forms[number // 100 % len(forms)].format(name=name)
        pair = PydocPair(name=name, kind=kind, question=question, answer=answer)
        (held_out if number % 100 < HELD_OUT_PERCENT else train).append(pair)
    if not train or not held_out:
        raise DataError(
            f"only {len(train) + len(held_out)} docstrings in the Python sources under {root}",
            why="the set pydoc is made from them",
            fix="use a Python installed with its sources, or train on a JSONL file",
        )
    return PydocSet(tuple(train), tuple(held_out))


def _docstrings(root: Path) -> Iterator[tuple[str, str, str]]:
    """Qualified name, kind and docstring of everything public that has one, in a fixed order."""
    for path in _sources(root):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not ours to report
            tree = ast.parse(path.read_bytes(), filename=str(path))
        if (text := ast.get_docstring(tree)) is not None:
            yield module, "module", text
        yield from _members(tree, module)


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        # Package folders are identifiers; the others (config-3.11-x86_64, __pycache__) hold no modules.
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name.isidentifier() and not name.startswith("_") and name not in SKIPPED_FOLDERS
        )
        for file in sorted(files):
            stem, extension = os.path.splitext(file)
            is_package = stem == "__init__" and Path(folder) != root
            if extension == ".py" and stem.isidentifier() and (is_package or not stem.startswith("_")):
                yield Path(folder, file)


def _members(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str, str]]:
    for member in node.body:
        if not isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if member.name.startswith("_"):
            continue
        name = f"{prefix}.{member.name}"
        text = ast.get_docstring(member)
        if isinstance(member, ast.ClassDef):
            if text is not None:
                yield name, "class", text
            yield from _members(member, name)
        elif text is not None:
            yield name, "method" if isinstance(node, ast.ClassDef) else "function", text
