"""Everything that KV values depend on other than tokens, from a built engine configuration, before weights are loaded.

Everything that may decide a KV value goes in: a part without proven influence costs a cold cache when it changes, never
wrong KV. What cannot be named is not shared (`why_not_shared`): then the replicas keep their own prefix caches, and
nothing is stored.

Leans on vLLM: `VllmConfig`; `vllm.envs.compile_factors`, the environment variables that change what vLLM
computes; and the places where a model asks `max_model_len` (`_length`).
`tests/deployments/engine/test_model_identity.py` fails when these change.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from configs.engine_arguments import that_may_change_kv
from configs.settings import Settings
from deployments.engine.checks import keeps_states, unsupported_kv, untested_over_ranks
from kvmanager.segments.keys import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

KV_LAYOUT_VERSION = 1
"""Raise it when the canonical order of a segment's payload, or what it holds, changes."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json")
_WITHOUT_A_NAME = ("", "vec, AVX512", "neon, DEFAULT")
"""Kinds of processor (`kv.processor`) that are not in the identity: there what was stored before it had any is read."""
_OF_THE_TOKENIZER = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "chat_template.json",
    }
)
_MEASURED_HERE = "crosskv_*.json"
"""Files of `make profile-…` next to weights decide no KV: any of it reads the same KV; codecs name their profile."""
_READS_THE_FOLDER = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"}
)
"""Load formats that take the weights from the model's own files."""
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
_ROPE_OF_ANY_LENGTH = frozenset(
    {"default", "linear", "llama3", "ntk", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "proportional"}
)
"""Rope types whose rotation of a position does not depend on how long requests may become."""
_LLAMA4_TUNES_ABOVE_TOKENS = 32768
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_identity(config: VllmConfig, settings: Settings) -> ModelIdentity:
    """The identity of what an engine with `config` computes, built from `settings`. Imports vLLM.

    Reads a local model's files once per process and state of the files.
    """
    model = config.model_config
    cache_dtype = config.cache_config.cache_dtype
    return ModelIdentity(
        weights=weights_identity(config),
        dtype=str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else str(cache_dtype),
        kv_layout_version=KV_LAYOUT_VERSION,
        block_size=config.cache_config.block_size,
        rope=_canonical(_rope(model)),
        num_layers=model.get_num_layers(config.parallel_config),
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_dim=model.get_head_size(),
        computation=_canonical(_computation(config, settings)),
    )


def weights_identity(config: VllmConfig) -> str:
    """A hub model's commit, or a digest of every byte of a folder's weights and code.

    Does not change while the files do not. An engine that loads may change its configuration, so this is what can be
    compared before and after.
    """
    model = config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        return f"{model.model}@{_commit(model) or 'unknown'}"
    digest = xxhash.xxh3_128()
    files = {file for pattern in _WEIGHTS for file in folder.glob(pattern) if file.name not in _OF_THE_TOKENIZER}
    files -= set(folder.glob(_MEASURED_HERE))
    for file in sorted(files | set(folder.rglob("*.py"))):
        digest.update(f"{file.relative_to(folder)}:{_file_digest(file)}\n".encode())
    return f"xxh3:{digest.hexdigest()}"


def why_not_shared(config: VllmConfig) -> str | None:
    """A sentence that says why KV is not shared: crosskv does not move such KV, or cannot name it. None: it is."""
    return next(chain(unsupported_kv(config), untested_over_ranks(config), _unnamed(config)), None)


def why_apart(settings: Settings) -> str | None:
    """A sentence that says why this node's engines do not share KV with the server's others; None: they do."""
    here, shared = settings.processor_here, _processor(settings)
    if not settings.kv.enabled or here == shared:
        return None
    return (
        f"the processors of this node are of the kind {here!r}, and KV of the kind {shared!r} is shared "
        "(kv.processor): its last bits are others; take nodes of one kind, or set kv.processor to that of most"
    )


def _processor(settings: Settings) -> str:
    """The kind of processor whose KV is shared: found once for an application, by `app.builder`, or this node's."""
    here = settings.processor_here
    return (settings.kv.processor or here) if here else ""


def _unnamed(config: VllmConfig) -> Iterator[str]:
    model, load, speculation = config.model_config, config.load_config, config.speculative_config
    if load.load_format not in _READS_THE_FOLDER:
        yield (
            f"load_format {load.load_format!r} takes the weights from elsewhere than the model's files, and nothing "
            f"says which they are; use one of {sorted(_READS_THE_FOLDER)} to share KV"
        )
    if model.model_weights:
        yield f"the weights come from {model.model_weights!r}, and nothing says which they are; load them from a folder"
    if not Path(model.model).is_dir() and _commit(model) is None:
        yield (
            f"the commit of {model.model!r} is unknown, and a name may mean other weights tomorrow; set revision in "
            "engine.extra_args to a commit, or download the model and give its folder"
        )
    foreign = _code_of_another_repository(model)
    if foreign and not _COMMIT.fullmatch(model.code_revision or ""):
        yield (
            f"the model's code comes from {foreign!r}, whose commit is unknown; set code_revision in engine.extra_args "
            "to a commit"
        )
    elif model.code_revision and not foreign and not _COMMIT.fullmatch(model.code_revision):
        yield f"code_revision {model.code_revision!r} may mean other code tomorrow; set it to a commit"
    if speculation is not None and speculation.method not in _DRAFTS_WITHOUT_KV:
        yield (
            f"speculative_config's {speculation.method!r} keeps KV of a draft, which depends on later tokens; "
            f"use one of {sorted(_DRAFTS_WITHOUT_KV)} to share KV"
        )
    if model.using_transformers_backend() and not _rope_types(model) <= _ROPE_OF_ANY_LENGTH:
        yield (
            "Transformers' own code rotates by the longest request of a step, so equal prompts have different KV; use "
            "a model that vLLM implements to share KV"
        )


def _computation(config: VllmConfig, settings: Settings) -> dict[str, Any]:
    import torch
    import transformers
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    model = config.model_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "backend": current_platform.device_type,
        "machine": platform.machine(),
        "dtype": str(model.dtype),  # in which it is computed: KV may be kept in another one
        "config": _used_config(model),
        "quantization": model.quantization,
        "eager": model.enforce_eager,
        "arguments": that_may_change_kv(settings.engine.extra_args),
        "environment": envs.compile_factors(),
        # Layers that may carry an adapter compute their base's KV by other kernels.
        **({"lora": config.lora_config.compute_hash()} if config.lora_config is not None else {}),
        # Sums over ranks round otherwise than one rank's.
        **({"ranks": ranks} if (ranks := config.parallel_config.tensor_parallel_size) > 1 else {}),
        **({"states": _states(config)} if keeps_states(config) else {}),
        **({} if (kind := _processor(settings)) in _WITHOUT_A_NAME else {"processor": kind}),
    }


def _states(config: VllmConfig) -> dict[str, Any]:
    """What decides the bytes of states: they are stored as vLLM has them."""
    cache = config.cache_config
    layout = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT")
    return {
        "convolution": str(cache.mamba_cache_dtype),
        "recurrence": str(cache.mamba_ssm_cache_dtype),
        "mode": cache.mamba_cache_mode,
        "layout": layout,
    }


def _used_config(model: ModelConfig) -> dict[str, Any]:
    """The model's configuration as it is used, overrides included; where it lies on this machine does not count."""
    return {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}


def _rope(model: ModelConfig) -> dict[str, Any]:
    text = model.hf_text_config
    return {
        "parameters": getattr(text, "rope_parameters", None),
        "theta": getattr(text, "rope_theta", None),
        "scaling": getattr(text, "rope_scaling", None),
        "length": _length(model),
    }


def _length(model: ModelConfig) -> object:
    """What `max_model_len` decides about KV; None for most models.

    LongRoPE takes its long factors for all positions as soon as requests may be longer than the original length. Llama
    4 tunes attention where they may be longer than 32,768 tokens. An unknown rope may do anything.
    """
    longest = model.max_model_len
    if "llama4" in f"{model.hf_config.model_type} {model.hf_text_config.model_type}":
        return longest > _LLAMA4_TUNES_ABOVE_TOKENS
    unknown = _rope_types(model) - _ROPE_OF_ANY_LENGTH
    if not unknown:
        return None
    originals = [parameters.get("original_max_position_embeddings") or 0 for parameters in _rope_parameters(model)]
    if unknown == {"longrope"} and all(originals):
        return [longest > original for original in originals]
    return longest


def _rope_types(model: ModelConfig) -> set[str]:
    """The types of all layers' ropes."""
    return {str(one.get("rope_type") or one.get("type") or "default") for one in _rope_parameters(model)}


def _rope_parameters(model: ModelConfig) -> list[Mapping[str, Any]]:
    """Of all layers, or of each kind of layers where they differ."""
    text = model.hf_text_config
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _commit(model: ModelConfig) -> str | None:
    """The commit of a hub model's weights."""
    commit = getattr(model.revision, "resolved", None) or model.revision
    if commit is None and not model.hf_config_path:
        commit = getattr(model.hf_config, "_commit_hash", None)
    return str(commit) if commit and _COMMIT.fullmatch(str(commit)) else None


def _code_of_another_repository(model: ModelConfig) -> str | None:
    """`owner/name` where the configuration says that the model's code lies in another repository than its weights."""
    if not model.trust_remote_code:
        return None
    classes = (getattr(model.hf_config, "auto_map", None) or {}).values()
    places = [str(place).partition("--") for place in classes]
    return next((repository for repository, separator, _ in places if separator), None)


_DIGESTS: dict[tuple[str, int, int, int, int], str] = {}


def _file_digest(file: Path) -> str:
    """Digest of a file's content; read again only when its size, times or inode have changed."""
    before = file.stat()
    state = (str(file), before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    if state not in _DIGESTS:
        digest = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while chunk := stream.read(16 << 20):
                digest.update(chunk)
        _DIGESTS[state] = digest.hexdigest()
    return _DIGESTS[state]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
