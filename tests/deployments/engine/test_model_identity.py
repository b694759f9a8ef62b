"""Equal engines have equal identities and others do not; what has no name is not shared, and the start says so."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from vllm import envs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

from configs.settings import load_settings
from deployments.engine.engine_args import engine_config
from deployments.engine.model_identity import (
    _ROPE_OF_ANY_LENGTH,
    model_identity,
    weights_identity,
    why_not_shared,
)
from kvmanager.segments.keys import ModelIdentity
from tests.sizes import LONG

ENGINE: dict[str, Any] = {"device_blocks": 100}

LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}

FEW = hypothesis_settings(max_examples=10 if LONG else 2, deadline=None)
"""Choices of further settings, for each that a test is about."""

Choice: TypeAlias = Mapping[str, Any]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("changed") / "demo"))


def identity(model: Path, **settings: Any) -> ModelIdentity:
    """The identity of the demo model in float32 with these settings; `extra` are extra_args, `env` the environment."""
    env, extra = settings.pop("env", {}), settings.pop("extra", {})
    engine = {**ENGINE, **settings.pop("engine", {}), "extra_args": extra}
    loaded = load_settings({"model": str(model), "dtype": "float32", **settings, "engine": engine})
    with mock.patch.dict(os.environ, env):
        return model_identity(engine_config(loaded), loaded)


@contextmanager
def changed(file: Path, content: bytes) -> Iterator[None]:
    original = file.read_bytes() if file.exists() else None
    try:
        file.write_bytes(content)
        yield
    finally:
        if original is None:
            file.unlink()
        else:
            file.write_bytes(original)


@pytest.mark.parametrize("place", [0.0, 0.37, 0.9999999])
def test_any_byte_of_the_weights_changes_the_identity(model: Path, place: float) -> None:
    before = identity(model)
    damaged = bytearray((model / "model.safetensors").read_bytes())
    damaged[int(len(damaged) * place)] ^= 1
    with changed(model / "model.safetensors", bytes(damaged)):
        assert identity(model).weights != before.weights
        assert identity(model).fingerprint() != before.fingerprint()
    assert identity(model) == before


@pytest.mark.parametrize(
    "name", ["modeling_own.py", "code/layers.py", "model.safetensors.index.json", "generation_config.json"]
)
def test_every_file_that_may_decide_kv_is_part_of_the_identity(model: Path, name: str) -> None:
    before = identity(model)
    (model / name).parent.mkdir(exist_ok=True)
    with changed(model / name, b"{}"):
        with_file = identity(model)
        with changed(model / name, b'{"a":1}'):
            assert len({before, with_file, identity(model)}) == 3
    assert identity(model) == before


def test_tokenizer_calibration_and_folder_are_no_part_of_the_identity(model: Path, tmp_path: Path) -> None:
    before = identity(model)
    with changed(model / "chat_template.json", b"{}"), changed(model / "crosskv_blend.json", b"{}"):
        assert identity(model) == before
    assert identity(Path(shutil.copytree(model, tmp_path / "elsewhere"))) == before


def test_weights_are_read_once_while_they_do_not_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity(model)
    opened: list[str] = []
    plain_open = Path.open

    def watch(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return plain_open(path, *args, **options)

    monkeypatch.setattr(Path, "open", watch)
    identity(model)
    assert "model.safetensors" not in opened
    with changed(model / "model.safetensors", b"other"):
        weights_identity(engine_config(load_settings({"model": str(model), "engine": ENGINE})))
    assert "model.safetensors" in opened


def test_the_models_configuration_is_part_of_the_identity(model: Path) -> None:
    before = identity(model)
    text = (model / "config.json").read_text()
    with changed(model / "config.json", text.replace("10000000.0", "10000.0").encode()):
        assert identity(model) != before


DECIDES: list[tuple[str, list[Choice]]] = [
    ("dtype", [{"dtype": "float32"}, {"dtype": "bfloat16"}]),
    ("block size", [{"engine": {"block_size_tokens": n}} for n in (32, 64, 128)]),
    ("compiled", [{"engine": {"enforce_eager": eager}} for eager in (True, False)]),
    ("override", [{"extra": {"hf_overrides": {"rms_norm_eps": eps}}} for eps in (1e-5, 1e-6, 1e-3)]),
    (
        "nested override",
        [
            {"extra": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": t}}}}
            for t in (1e4, 1e6)
        ],
    ),
    ("load format", [{"extra": {"load_format": name}} for name in ("auto", "pt", "safetensors", "dummy")]),
    ("implementation", [{"extra": {"model_impl": name}} for name in ("auto", "vllm")]),
    ("compilation", [{"extra": {"compilation_config": {"mode": mode}}} for mode in (0, 3)]),
    ("cascade", [{"extra": {"disable_cascade_attn": off}} for off in (True, False)]),
    ("KV type", [{"extra": {"kv_cache_dtype": name}} for name in ("auto", "bfloat16", "fp8", "fp8_e5m2")]),
    ("code", [{"extra": {"code_revision": revision}} for revision in ("main", "other")]),
    (
        "generation",
        [{"extra": {"override_generation_config": {"attn_temperature_tuning": on}}} for on in (True, False)],
    ),
    ("batch invariance", [{"env": {"VLLM_BATCH_INVARIANT": on}} for on in ("0", "1")]),
    ("product precision", [{"env": {"VLLM_FLOAT32_MATMUL_PRECISION": kind}} for kind in ("highest", "high")]),
    (
        "LongRoPE's switch",
        [{"extra": {"hf_overrides": {"rope_parameters": LONG_ROPE}}, "max_model_len": n} for n in (1024, 1025)],
    ),
]
"""Settings that decide KV, each with values of which any two give different KV, or may."""

DECIDES_NOTHING: list[tuple[str, list[Choice]]] = [
    ("sequences", [{"engine": {"max_num_seqs": n}} for n in (1, 8)]),
    ("step", [{"engine": {"max_num_batched_tokens": n}} for n in (512, 1024)]),
    ("device blocks", [{"engine": {"device_blocks": n}} for n in (90, 120)]),
    ("longest request", [{"max_model_len": n} for n in (1000, 2000)]),
    ("seed", [{"extra": {"seed": n}} for n in (0, 7)]),
    ("name", [{"served_model_name": name} for name in ("one", "other")]),
    ("segments", [{"kv": {"segment_tokens": n}} for n in (256, 512)]),
    ("scheduling", [{"extra": {"long_prefill_token_threshold": n}} for n in (0, 100)]),
    ("logprobs", [{"extra": {"max_logprobs": n}} for n in (5, 20)]),
    ("memory", [{"extra": {"gpu_memory_utilization": share}} for share in (0.3, 0.5)]),
    ("log", [{"env": {"VLLM_LOGGING_LEVEL": level}} for level in ("INFO", "ERROR")]),
]


def merged(*choices: Choice) -> dict[str, Any]:
    """Settings with all choices made; later ones win."""
    together: dict[str, Any] = {}
    for choice in choices:
        for name, value in choice.items():
            both = isinstance(value, Mapping) and isinstance(together.get(name), Mapping)
            together[name] = merged(together[name], value) if both else value
    return together


@st.composite
def two_that_differ_in(draw: st.DrawFn, kind: tuple[str, list[Choice]]) -> tuple[Choice, Choice]:
    """Two settings: the same further choices of any kinds, and that of `kind` made differently."""
    name, values = kind
    others = [kind for kind in (*DECIDES, *DECIDES_NOTHING) if kind[0] != name and not _disturb(kind[0], name)]
    background = [draw(st.sampled_from(kind[1])) for kind in draw(st.lists(st.sampled_from(others), max_size=4))]
    first, second = draw(st.permutations(values))[:2]
    return merged(*background, first), merged(*background, second)


def _disturb(other: str, name: str) -> bool:
    """Whether `other` sets what `name` is about as well."""
    lengths, overrides = {"LongRoPE's switch", "longest request"}, {"LongRoPE's switch", "nested override"}
    return {other, name} <= lengths or {other, name} <= overrides or (other, name) in (
        ("LongRoPE's switch", "device blocks"), ("device blocks", "LongRoPE's switch"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", DECIDES, ids=lambda kind: kind[0])
@FEW
@given(data=st.data())
def test_one_setting_that_decides_kv_changes_the_fingerprint(
    model: Path, kind: tuple[str, list[Choice]], data: st.DataObject
) -> None:
    one, other = (identity(model, **merged(choice)) for choice in data.draw(two_that_differ_in(kind)))
    assert one.fingerprint() != other.fingerprint()


def test_a_plain_model_is_named_by_what_it_was_named_by_before_other_kinds_were_shared(model: Path) -> None:
    """So stores that are older than these are read. What a processor's kind adds is told apart elsewhere."""
    named = set(json.loads(identity(model).computation)) - {"processor"}
    assert named == {
        "vllm", "torch", "transformers", "backend", "machine", "dtype", "config", "quantization", "eager", "arguments",
        "environment",
    }  # fmt: skip


def test_what_kv_is_computed_in_counts_where_it_is_kept_in_another_type(model: Path) -> None:
    kept = {"kv_cache_dtype": "bfloat16"}
    assert len({identity(model, dtype=name, extra=kept).fingerprint() for name in ("float32", "bfloat16")}) == 2


@pytest.mark.parametrize("kind", DECIDES_NOTHING, ids=lambda kind: kind[0])
@FEW
@given(data=st.data())
def test_a_setting_that_decides_no_kv_keeps_the_fingerprint(
    model: Path, kind: tuple[str, list[Choice]], data: st.DataObject
) -> None:
    one, other = (identity(model, **merged(choice)) for choice in data.draw(two_that_differ_in(kind)))
    assert one == other


@pytest.mark.parametrize("what", ["vllm.__version__", "torch.__version__", "transformers.__version__"])
def test_an_upgrade_changes_the_fingerprint(model: Path, what: str) -> None:
    before = identity(model)
    with mock.patch(what, "99.0"):
        assert identity(model) != before


def test_another_backend_or_machine_changes_the_fingerprint(model: Path) -> None:
    settings = load_settings({"model": str(model), "dtype": "float32", "engine": ENGINE})
    config = engine_config(settings)
    here = model_identity(config, settings)
    with mock.patch("vllm.platforms.current_platform", SimpleNamespace(device_type="cuda")):
        elsewhere = model_identity(config, settings)
    with mock.patch("platform.machine", return_value="other"):
        assert len({here, elsewhere, model_identity(config, settings)}) == 3


# What has no name.


def config_of(model: Path, **extra: Any) -> Any:
    return engine_config(load_settings({"model": str(model), "engine": {**ENGINE, "extra_args": extra}}))


def test_a_folder_is_shared(model: Path) -> None:
    config = config_of(model)
    assert why_not_shared(config) is None
    assert config.kv_transfer_config is not None


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"load_format": "dummy"}, "load_format 'dummy'"),
        ({"load_format": "tensorizer"}, "load_format 'tensorizer'"),
        ({"code_revision": "main"}, "code_revision 'main'"),
    ],
)
def test_what_cannot_be_named_is_not_shared_and_the_start_says_so(
    model: Path, caplog: pytest.LogCaptureFixture, extra: dict[str, Any], reason: str
) -> None:
    config = config_of(model, **extra)
    assert config.kv_transfer_config is None
    assert config.cache_config.enable_prefix_caching, "each replica keeps a prefix cache of its own"
    assert reason in (why_not_shared(config) or "")
    assert reason in caplog.text


def hub(model: Path, **parts: Any) -> Any:
    """The configuration of a model with a hub's name; `parts` replace what the model configuration says."""
    config = config_of(model)
    vars(config.model_config).update({"model": "some/model", **parts})
    return config


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_model_is_named_by_its_commit(model: Path) -> None:
    class Resolved(str):
        resolved = COMMIT

    for parts in ({"revision": COMMIT}, {"revision": Resolved("main")}):
        config = hub(model, **parts)
        assert why_not_shared(config) is None
        assert weights_identity(config) == f"some/model@{COMMIT}"


@pytest.mark.parametrize("revision", [None, "main", "v1.0"])
def test_a_hub_model_whose_commit_is_unknown_is_not_shared(model: Path, revision: str | None) -> None:
    assert "the commit of 'some/model' is unknown" in (why_not_shared(hub(model, revision=revision)) or "")


def test_a_hub_models_own_configuration_tells_its_commit_and_anothers_does_not(model: Path) -> None:
    config = hub(model, revision=None)
    config.model_config.hf_config._commit_hash = COMMIT
    assert why_not_shared(config) is None
    config.model_config.hf_config_path = "another/model"
    assert "is unknown" in (why_not_shared(config) or "")


def test_code_of_another_repository_needs_a_commit(model: Path) -> None:
    config = config_of(model)
    config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": "some/code--modeling.Model"}
    assert why_not_shared(config) is None, "code that is not trusted is not run"
    config.model_config.trust_remote_code = True
    assert "some/code" in (why_not_shared(config) or "")
    config.model_config.code_revision = COMMIT
    assert why_not_shared(config) is None


def test_a_draft_with_kv_of_its_own_is_not_shared(model: Path) -> None:
    config = config_of(model)
    for method, shared in (("ngram", True), ("suffix", True), ("eagle", False), ("draft_model", False)):
        config.speculative_config = SimpleNamespace(method=method)
        assert (why_not_shared(config) is None) == shared, method


def test_rope_that_depends_on_who_else_asks_is_not_shared(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model)
    monkeypatch.setattr(type(config.model_config), "using_transformers_backend", lambda self: True)
    assert why_not_shared(config) is None
    config.model_config.hf_text_config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert "longest request of a step" in (why_not_shared(config) or "")


# What vLLM must be like.


def test_each_rope_type_of_vllms_has_been_looked_at() -> None:
    kinds = re.findall(r"scaling_type (?:==|in) (.*):", inspect.getsource(rotary_embedding.get_rope))
    types = set(re.findall(r'"(\w+)"', " ".join(kinds)))
    asks_the_length = {"longrope"}
    tables_of_unknown_use = {"dynamic", "bailing_mrope", "mllama4", "openpangu"}  # max_model_len is in the identity
    assert types == _ROPE_OF_ANY_LENGTH | asks_the_length | tables_of_unknown_use


def test_only_long_rope_asks_how_long_requests_may_become() -> None:
    folder = Path(inspect.getfile(rotary_embedding)).parent
    asking = {file.name for file in folder.glob("*.py") if "max_model_len" in file.read_text()}
    assert asking == {"phi3_long_rope_scaled_rope.py"}
    source = inspect.getsource(Phi3LongRoPEScaledRotaryEmbedding)
    assert "self.use_long_rope = max_model_len > original_max_position_embeddings" in source
    assert "max_model_len > 32768" in inspect.getsource(Llama4ForCausalLM)


def test_vllm_says_which_variables_change_what_it_computes() -> None:
    factors = envs.compile_factors()
    assert {"VLLM_BATCH_INVARIANT", "VLLM_FLOAT32_MATMUL_PRECISION"} <= set(factors)
    assert {"VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES"}.isdisjoint(factors)
    assert not re.search(r"0x[0-9a-f]{6}", json.dumps(factors, default=str)), "no addresses of this process"
