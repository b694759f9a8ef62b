"""Whether all files of a model's folder are whole: no pointer of Git LFS, no shard missing or cut, a tokenizer.

Of safetensors the header is read (8 bytes of length, JSON, offsets), of PyTorch's files the end of the zip archive.
Leans on vLLM: which weights it takes (`DefaultModelLoader._prepare_weights`: safetensors before `.bin` before `.pt`).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from configs.errors import SettingsError
from configs.model_folder import is_lfs_pointer, read_json

_AGAIN = "copy the model's folder again"
_OWN_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral")
"""Load formats whose weights lie in the folder as files of these kinds."""
_SHARD = re.compile(r"(?P<stem>.+-)(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)")
_JSON_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tokenizer.model.v*",
)
_LONGEST_HEADER_BYTES = 100_000_000
"""Safetensors' own limit."""


def check_model_files(folder: Path, extra_args: Mapping[str, Any]) -> str:
    """Say what is there. Raises SettingsError for the first file that is not as it should be."""
    try:
        for name in _JSON_FILES:
            if (folder / name).is_file():
                read_json(folder / name)
        _check_tokenizer(folder)
        if str(extra_args.get("load_format", "auto")) not in _OWN_FORMATS:
            return "a tokenizer; weights are not looked at for this engine.extra_args.load_format"
        weights = _weights(folder)
        for file in weights:
            check_weights(file)
    except ValueError as error:
        raise SettingsError(f"model: {error}.") from None
    except OSError as error:
        raise SettingsError(f"model: {error.filename} cannot be read ({error.strerror}); {_AGAIN}.") from None
    nbytes = sum(file.stat().st_size for file in weights)
    return f"a tokenizer, and weights of {nbytes / 1024**3:.2f} GiB, files: {len(weights)}"


def _check_tokenizer(folder: Path) -> None:
    files = [file for pattern in _TOKENIZERS for file in folder.glob(pattern)]
    own_code = "auto_map" in (read_json(own) if (own := folder / "tokenizer_config.json").is_file() else {})
    if not files and not own_code:
        raise ValueError(f"{folder} holds no tokenizer, such as tokenizer.json; {_AGAIN}")
    for file in files:
        if is_lfs_pointer(file) or file.suffix == ".json":
            read_json(file)  # says what is wrong
        elif not file.stat().st_size:
            raise ValueError(f"{file} is empty; {_AGAIN}")


def _weights(folder: Path) -> list[Path]:
    """The files that vLLM loads, all of which are there."""
    for suffix in (".safetensors", ".bin", ".pt"):
        found = sorted(file for file in folder.glob(f"*{suffix}") if file.name != "training_args.bin")
        listed = _listed(folder, suffix)
        if not found and not listed:
            continue
        missing = [file for file in [*listed, *_of_the_same(found)] if not file.is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{missing[0]}{more}, a shard of the weights, is not there; {_AGAIN}")
        consolidated = [file for file in found if file.name.startswith("consolidated")]
        return listed or (found if len(found) == len(consolidated) else sorted({*found} - {*consolidated}))
    raise ValueError(f"{folder} holds no weights, such as model.safetensors; {_AGAIN}")


def _listed(folder: Path, suffix: str) -> list[Path]:
    """The files that an index names."""
    for stem in ("model", "pytorch_model"):
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise ValueError(f"{index} has no `weight_map` from weights to files; {_AGAIN}")
            return [folder / name for name in sorted(set(names.values()))]
    return []


def _of_the_same(found: Iterable[Path]) -> list[Path]:
    """All shards of which one is there, by their names: `model-00001-of-00003.safetensors`."""
    wanted: dict[Path, None] = {}
    for file in found:
        if shard := _SHARD.fullmatch(file.name):
            width, first = len(shard["number"]), min(1, int(shard["number"]))
            for number in range(first, min(int(shard["count"]), 10_000) + first):
                wanted[file.with_name(f"{shard['stem']}{number:0{width}}-of-{shard['count']}{shard['suffix']}")] = None
    return list(wanted)


def check_weights(file: Path) -> None:
    """Raise ValueError, in a sentence, for a file of weights that is not whole."""
    size = file.stat().st_size
    if not size:
        raise ValueError(f"{file} is empty; {_AGAIN}")
    if is_lfs_pointer(file):
        raise ValueError(f"{file} is a pointer of Git LFS, not the file; run `git lfs pull` in {file.parent}")
    if file.suffix == ".safetensors":
        wanted = _safetensors_bytes(file, size)
        if wanted != size:
            what = "is cut" if size < wanted else "has more than its header says"
            raise ValueError(f"{file} {what}: {size} bytes, and its header says {wanted}; {_AGAIN}")
    elif _begins_as_archive(file) and not zipfile.is_zipfile(file):
        raise ValueError(f"{file} is cut: it has no end of a PyTorch archive; {_AGAIN}")


def _begins_as_archive(file: Path) -> bool:
    """Whether it is of PyTorch's newer form; an older one is a bare pickle, of which nothing says the length."""
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def _safetensors_bytes(file: Path, size: int) -> int:
    """How long a file is by its header. Raises ValueError for a file that has none."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > _LONGEST_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file; {_AGAIN}")
        if 8 + length > size:
            return 8 + length
        text = opened.read(length)
    try:
        header = json.loads(text)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} is no safetensors file: its header cannot be read; {_AGAIN}") from None
    return 8 + length + max(ends, default=0)
