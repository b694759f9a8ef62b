"""Whether a model answers chats: vLLM serves models that embed, classify or transcribe, too, and this server does not.

Leans on vLLM: the groups of `model_executor/models/registry.py`, a sentence-transformers folder's `modules.json`, and
`supports_transcription_only` in a model's source. An architecture that vLLM does not list may still be one that it can
load (by transformers, or a plugin), so it passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.checks.vllm_source import tables, vllm_folder
from configs.errors import SettingsError
from configs.model_folder import read_config

_REGISTRY = "model_executor/models/registry.py"
_ANSWERS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
_OTHERS = {
    "_EMBEDDING_MODELS": "embeds texts",
    "_LATE_INTERACTION_MODELS": "embeds texts",
    "_REWARD_MODELS": "rates answers",
    "_TOKEN_CLASSIFICATION_MODELS": "classifies tokens",
    "_SEQUENCE_CLASSIFICATION_MODELS": "classifies texts",
    "_SPECULATIVE_DECODING_MODELS": "drafts tokens for another model",
}
_HEADS = {
    "ForSequenceClassification": "classifies texts",
    "ForTokenClassification": "classifies tokens",
    "ForMaskedLM": "fills gaps in texts",
    "ForQuestionAnswering": "marks answers in texts",
    "ForImageClassification": "classifies pictures",
    "EmbeddingModel": "embeds texts",
    "RewardModel": "rates answers",
}
"""What classes of transformers do, by the end of their name."""
_WORKS = "use one that generates text"


def check_architecture(folder: Path, extra_args: Mapping[str, Any]) -> str:
    """Say what the model is. Raises SettingsError for one that answers no chats."""
    config = read_config(folder)
    if extra_args.get("hf_overrides"):
        return "config.json is changed by engine.extra_args.hf_overrides, and was not looked at"
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise SettingsError(
            f"model: {folder / 'config.json'} names no `architectures`, so vLLM cannot tell what to load; copy the "
            f"model's folder again."
        )
    if extra_args.get("runner", "auto") == "auto" and _is_sentence_transformer(folder):
        raise SettingsError(
            f"model: {folder} is a sentence-transformers model (modules.json), which embeds texts and answers no "
            f"chats; {_WORKS}."
        )
    if not any(_answers(name) for name in names):
        _refuse(folder, names[0], bool(config.get("is_encoder_decoder")))
    return f"{names[0]} generates text"


def _answers(name: str) -> bool:
    known = tables(_REGISTRY)
    for group in _ANSWERS:
        if name in known.get(group, ()):
            return not _only_transcribes(known[group][name])  # type: ignore[call-overload]  # a mapping
    return False


def _refuse(folder: Path, name: str, two_parts: bool) -> None:
    known = tables(_REGISTRY)
    does = next((does for group, does in _OTHERS.items() if name in known.get(group, ())), None)
    does = does or next((does for head, does in _HEADS.items() if name.endswith(head)), None)
    if any(name in known.get(group, ()) for group in _ANSWERS):
        does = "transcribes speech"
    if does is not None:
        raise SettingsError(f"model: {folder} is a {name}, which {does} and answers no chats; {_WORKS}.")
    gone, elsewhere = known.get("_PREVIOUSLY_SUPPORTED_MODELS", {}), known.get("_OOT_SUPPORTED_MODELS", {})
    if name in gone:
        raise SettingsError(f"model: {folder} is a {name}, which this vLLM no longer serves; {_WORKS}.")
    if name not in elsewhere and two_parts:
        raise SettingsError(
            f"model: {folder} is a {name}, an encoder with a decoder, which this vLLM does not serve; use a model that "
            f"is a decoder alone."
        )


def _is_sentence_transformer(folder: Path) -> bool:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    parts = modules if isinstance(modules, list) else []
    return any(isinstance(part, dict) and str(part.get("type", "")).endswith("Pooling") for part in parts)


def _only_transcribes(entry: Any) -> bool:
    """Of a registry's entry: the module, and the class in it."""
    package = vllm_folder()
    if package is None or not isinstance(entry, tuple) or "." in str(entry[0]):
        return False
    file = package / "model_executor" / "models" / f"{entry[0]}.py"
    try:
        return re.search(r"supports_transcription_only\b.*= True", file.read_text(encoding="utf-8")) is not None
    except (OSError, ValueError):
        return False
