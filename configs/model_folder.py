"""The model that a `model:` line means: a folder of this machine, or an id of the Hugging Face hub."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from configs.presets import preset_names

PROJECT_ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = "models/demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FOLDER_PREFIXES = ("/", "./", "../", "~", "models/")
_LFS_HEAD = b"version https://git-lfs.github.com/spec/"
_WHOLE_NUMBERS = (
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "vocab_size",
)
"""Of config.json, where it says them: memory and lengths are counted by them."""


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
            f"there is no folder {model!r}; give a folder that holds a config.json, or a Hugging Face id with its "
            f"owner, such as 'Qwen/Qwen2.5-0.5B-Instruct'" + _hint(model)
        )
    return model


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file is what Git leaves in a large one's place when Git LFS is missing. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(len(_LFS_HEAD)) == _LFS_HEAD


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of a model. Raises ValueError, in one sentence, for a file that holds none."""
    try:
        if is_lfs_pointer(file):
            raise ValueError(f"{file} is a pointer of Git LFS, not the file; run `git lfs pull` in {file.parent}")
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); copy the model's folder again") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8; copy the model's folder again") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}); copy the model's folder again") from None
    except RecursionError:
        raise ValueError(f"{file} is not JSON that can be read; copy the model's folder again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold an object, not {_kind(found)}; copy the model's folder again")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json, in which all that is counted with is a number. Raises ValueError, in one sentence."""
    file = folder / "config.json"
    config = read_json(file)
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise ValueError(f"{file}: text_config must be an object, not {_kind(inner)}; copy the model's folder again")
    for part, where in ((config, ""), (inner or {}, "text_config.")):
        for name in _WHOLE_NUMBERS:
            if not _is_whole(part.get(name)):
                raise ValueError(
                    f"{file}: {where}{name} must be a whole number, not {_kind(part[name])}; copy the model's folder "
                    f"again"
                )
    return config


def text_config(folder: Path) -> dict[str, Any]:
    """What a model's config.json says of the part that reads and writes text."""
    config = read_config(folder)
    inner: dict[str, Any] = config.get("text_config") or config
    return inner


def own_max_tokens(model: Path | str) -> int | None:
    """Longest sequence, in tokens, that the model's config.json allows; None for a hub id or when it does not say."""
    if isinstance(model, str):
        return None
    length = text_config(model).get("max_position_embeddings")
    return int(length) if length is not None else None


def kv_shape(model: Path | str) -> tuple[int, int] | None:
    """Layers, and numbers of KV per token in all of them; None for a hub id or a config.json that does not say.

    As of plain full attention: keys and values of every KV head in every layer; or the latents of all layers.
    """
    if isinstance(model, str):
        return None
    config = text_config(model)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if layers and (width := latent_width(config)):
        return int(layers), int(layers) * width
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or (
        config["hidden_size"] // heads if heads and "hidden_size" in config else None
    )
    if not layers or not kv_heads or not head_size:
        return None
    return int(layers), 2 * int(layers) * int(kv_heads) * int(head_size)


def latent_width(config: dict[str, Any]) -> int:
    """Numbers that a layer keeps of a token instead of keys and values (MLA), by a `text_config`; 0: it keeps those."""
    rank = config.get("kv_lora_rank")
    return int(rank) + int(config.get("qk_rope_head_dim") or 0) if rank else 0


def is_quantized(model: Path | str) -> bool:
    """Whether the model's config.json says that its weights are quantized; a hub id says nothing."""
    if isinstance(model, str):
        return False
    config = read_config(model)
    return any(part.get("quantization_config") for part in (config, config.get("text_config") or {}))


def _checked(folder: Path, model: str) -> Path:
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"the folder {model!r} holds no config.json; give a folder in Hugging Face's format, or a Hugging Face id"
            + _demo_hint(model)
        )
    read_config(folder)
    return folder


def _hint(model: str) -> str:
    near = difflib.get_close_matches(model.lower(), preset_names(), 1)
    return f", or start the preset by `make serve MODEL={near[0]}`" if near else _demo_hint(model)


def _demo_hint(model: str) -> str:
    return " (`make demo-model` builds the demo model)" if model.rstrip("/") == DEMO_MODEL else ""


def _is_whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _kind(value: Any) -> str:
    """A JSON value in few words."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value)[:40]
