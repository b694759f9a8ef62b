"""Which model a `model:` line means: a folder of this machine, or an id of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PROJECT_ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = "models/demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FOLDER_PREFIXES = ("/", "./", "../", "~", "models/")


def find_model(model: str) -> Path | str:
    """The model's folder as an absolute path, or the hub id unchanged.

    A relative folder is looked for from the project's root, then from the working directory.

    Raises:
        ValueError: neither a folder that vLLM can load nor something that could be a hub id.
    """
    for base in (PROJECT_ROOT, Path.cwd()):
        folder = (base / Path(model).expanduser()).resolve()
        if folder.is_dir():
            return _checked(folder, model)
    if model.startswith(_FOLDER_PREFIXES) or not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"there is no folder {model!r}; give a folder that holds a config.json, or a Hugging Face id such as "
            f"'Qwen/Qwen2.5-0.5B-Instruct'" + _demo_hint(model)
        )
    return model


def own_max_tokens(model: Path | str) -> int | None:
    """Longest sequence, in tokens, that the model's config.json allows; None for a hub id or when it does not say."""
    if isinstance(model, str):
        return None
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    length = (config.get("text_config") or config).get("max_position_embeddings")
    return int(length) if length is not None else None


def kv_shape(model: Path | str) -> tuple[int, int] | None:
    """Layers, and numbers of KV per token in all of them; None for a hub id or a config.json that does not say.

    As of plain full attention: keys and values of every KV head in every layer.
    """
    if isinstance(model, str):
        return None
    whole: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = whole.get("text_config") or whole
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or (
        config["hidden_size"] // heads if heads and "hidden_size" in config else None
    )
    if not layers or not kv_heads or not head_size:
        return None
    return int(layers), 2 * int(layers) * int(kv_heads) * int(head_size)


def is_quantized(model: Path | str) -> bool:
    """Whether the model's config.json says that its weights are quantized; a hub id says nothing."""
    if isinstance(model, str):
        return False
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return any(part.get("quantization_config") for part in (config, config.get("text_config") or {}))


def _checked(folder: Path, model: str) -> Path:
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"the folder {model!r} holds no config.json; give a folder in Hugging Face's format, or a Hugging Face id"
            + _demo_hint(model)
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not JSON ({error}); copy the model's folder again") from None
    return folder


def _demo_hint(model: str) -> str:
    return " (`make demo-model` builds the demo model)" if model.rstrip("/") == DEMO_MODEL else ""
