"""LoRA adapters that are served by a name of their own (`engine.lora_adapters`): their folders, digests and ranks.

An adapter's files decide its KV, so their digest is a part of every name of that KV. What lies in the folder may change
while a server runs; its name says which files are meant.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from configs.model_folder import PROJECT_ROOT, read_json
from configs.section import Section

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""


class LoraAdapter(Section):
    """An adapter's folder, and which files it holds."""

    path: str = Field(min_length=1, description="A folder as PEFT saves it, on every node.")
    sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Digest of all its files. Empty: found when the server starts."
    )

    @property
    def folder(self) -> Path:
        """The folder; a relative one is looked for from the project's root."""
        return (PROJECT_ROOT / Path(self.path).expanduser()).resolve()

    def pinned(self) -> LoraAdapter:
        """The same adapter with the digest of its files as they are now, where none is given. Raises OSError."""
        return self if self.sha256 else self.model_copy(update={"sha256": adapter_digest(self.folder)})


def read_adapters(given: Any) -> Any:
    """A folder alone stands for an adapter of that folder."""
    if not isinstance(given, Mapping):
        return given
    return {name: {"path": value} if isinstance(value, str) else value for name, value in given.items()}


def require_adapter(folder: Path) -> tuple[int, Path]:
    """Return an adapter's rank and its file of weights.

    Raises ValueError, in a sentence, for a folder that vLLM could not load it from.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give one that PEFT has saved an adapter in")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds no {CONFIG}; give a folder that PEFT has saved an adapter in")
    config = read_json(folder / CONFIG)
    kind, rank = config.get("peft_type", "LORA"), config.get("r")
    if kind != "LORA":
        raise ValueError(f"{folder / CONFIG} is of an adapter of type {kind!r}; vLLM serves LORA")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        raise ValueError(f"{folder / CONFIG} says rank {rank!r}; vLLM serves ranks from 1 to {RANKS[-1]}")
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ValueError(f"{folder} holds no weights, such as {WEIGHTS[0]}; copy the adapter's folder again")
    return rank, weights


def served_rank(ranks: list[int]) -> int:
    """The least rank that vLLM can be started with to serve all of `ranks`."""
    return next(rank for rank in RANKS if rank >= max(ranks))


def adapter_digest(folder: Path) -> str:
    """SHA-256 (64 hex characters) over the names and bytes of all files below the folder, links followed."""
    digest = hashlib.sha256()
    found = (Path(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names)
    for file in sorted(file for file in found if file.is_file()):
        name = str(file.relative_to(folder)).encode()
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").digest()
        digest.update(len(name).to_bytes(8, "little") + name + content)
    return digest.hexdigest()
