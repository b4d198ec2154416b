"""What would each server say to this folder? Read from its configuration and the headers of its weights.

The rules are those of the servers' loaders, stated independently of what this library writes:

- vLLM (``method: dspark`` or ``dflash``): flat or speculators; vanilla Markov head; the drafter class is Qwen3's.
- SGLang (``DSPARK`` or ``DFLASH``): flat; takes embedding and head from the target, so a reduced vocabulary and a
  head of the drafter's own don't work; the drafter class is Qwen3's.
- speculators: its own nested format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.draft.formats.contents import Folder, Server, Verdict
from tokennorm.draft.formats.files import safetensors_module
from tokennorm.draft.formats.rules import check_folder
from tokennorm.errors import DataError

__all__ = ["Finding", "FolderReport", "validate_folder"]

SERVERS: tuple[Server, ...] = ("vllm", "sglang", "speculators")
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators"}
_SAYS: dict[Verdict, str] = {"refuses": "refuses it", "degrades": "loads it, but", "notes": "note"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a server would object to.

    Attributes:
        server: whose loader.
        verdict: ``refuses`` (an error at start-up, or outputs that can't be right), ``degrades`` (it runs, with
            less acceptance or without a feature) or ``notes``.
        message: in plain words.
    """

    server: Server
    verdict: Verdict
    message: str


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """All findings of one folder.

    Attributes:
        folder: that was read.
        findings: in the order of the servers.
    """

    folder: Path
    findings: tuple[Finding, ...]

    def serves(self, server: Server) -> bool:
        """Whether nothing speaks against loading it there."""
        return not any(found.server == server and found.verdict == "refuses" for found in self.findings)

    def __str__(self) -> str:
        lines = [str(self.folder)]
        for server in SERVERS:
            lines.append(f"  {_NAMES[server]}: {'can load it' if self.serves(server) else 'refuses it'}")
            lines += [
                f"    - {'' if found.verdict == 'refuses' else _SAYS[found.verdict] + ': '}{found.message}"
                for found in self.findings
                if found.server == server
            ]
        return "\n".join(lines)


def validate_folder(folder: Path | str, *, target: Mapping[str, Any] | Path | str | None = None) -> FolderReport:
    """Check a drafter's folder against the loaders of vLLM, SGLang and speculators.

    Reads the headers of the weights, not the weights (the table of a reduced vocabulary excepted).

    Args:
        folder: with ``config.json`` and safetensors files.
        target: the target's configuration, or its folder; then the two are compared too.

    Raises:
        DataError: a folder without ``config.json`` or weights: nothing can be said about it.
    """
    path = Path(folder)
    values = _read_json(path)
    whole = _read_json(Path(target)) if isinstance(target, Path | str) else target
    text = None if whole is None else whole.get("text_config", whole)
    shapes, offsets = _read_headers(path)
    contents = Folder(values=values, shapes=shapes, offsets=offsets, target=text)
    return FolderReport(folder=path, findings=tuple(_findings(contents)))


def _findings(contents: Folder) -> Iterator[Finding]:
    for server in SERVERS:
        for verdict, message in check_folder(contents, server):
            yield Finding(server=server, verdict=verdict, message=message)


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} has no config.json that can be read: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"config.json in {folder} is no object")
    return values


def _read_headers(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[int] | None]:
    library, shapes, offsets = safetensors_module(), {}, None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} has no weights (*.safetensors)")
    for path in files:
        try:
            with library.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    shapes[name] = tuple(file.get_slice(name).get_shape())
                    if name.removeprefix("model.") == "d2t":
                        offsets = file.get_tensor(name).tolist()
        except library.SafetensorError as error:
            raise DataError(f"{path} can't be read: {error}") from error
    return shapes, offsets
