"""LoRA adapters at the front: which name asks for which, under what names prompts go out, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CONTEXT, FINGERPRINT, MODEL, SECRET, Server, serve
from lora_folders import write_adapter
from vllm.config import VllmConfig

from app.checks.before_start import require_startable
from configs.errors import SettingsError
from configs.lora_adapters import adapter_digest
from configs.settings import PROJECT_ROOT, load_settings
from kvmanager.segments.keys import AdapterName, block_hashes, cache_salt

DEMO = PROJECT_ROOT / "models" / "demo"
TOKENS = list(range(70))
NAME = "support"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "lora", DEMO, seed=1)


@pytest.fixture(scope="module")
def replicas() -> FakeReplicas:
    return FakeReplicas()


@pytest.fixture(scope="module")
def server(vllm_config: VllmConfig, folder: Path, replicas: FakeReplicas) -> Any:
    with serve(
        vllm_config,
        backend(replicas, FakeControl()),
        engine={"lora_adapters": {NAME: str(folder)}},
        model_aliases=["*"],
        served_model_name=MODEL,
    ) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Any:
    with server.http() as client:
        yield client


def completed(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": TOKENS, "max_tokens": 3})


def named(adapter: AdapterName | None) -> list[bytes]:
    salt = cache_salt(SECRET, FINGERPRINT, "\0", adapter=adapter)
    return list(block_hashes(TOKENS, 32, salt, adapter))


def test_an_adapters_prompts_have_names_of_their_own(http: httpx.Client, replicas: FakeReplicas, folder: Path) -> None:
    adapter = AdapterName(NAME, adapter_digest(folder))
    answer = completed(http, NAME)
    assert (answer.status_code, answer.json()["model"]) == (200, NAME)
    sent = replicas.requests[-1]
    assert (sent.adapter, sent.block_hashes) == (adapter, named(adapter))

    for other in (MODEL, "anything that the aliases allow"):
        assert completed(http, other).json()["model"] == MODEL
        assert (replicas.requests[-1].adapter, replicas.requests[-1].block_hashes) == (None, named(None))
    assert not set(named(adapter)) & set(named(None))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}),
    ],
)
def test_every_dialect_asks_for_an_adapter_by_model(
    http: httpx.Client, replicas: FakeReplicas, path: str, body: dict[str, Any]
) -> None:
    for model, expected in ((NAME, NAME), (MODEL, None)):
        answer = http.post(path, json={"model": model, **body})
        assert (answer.status_code, answer.json()["model"]) == (200, model), answer.text
        adapter = replicas.requests[-1].adapter
        assert (adapter.name if adapter else None) == expected


def test_models_lists_adapters_with_the_model_that_they_are_of(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
        (MODEL, None, CONTEXT),
        (NAME, MODEL, CONTEXT),
    ]
    assert http.get(f"/v1/models/{NAME}").json()["id"] == NAME
    listed = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert [card["max_input_tokens"] for card in listed] == [CONTEXT, CONTEXT]


def test_the_control_api_finds_an_adapters_prompt_by_its_model(http: httpx.Client) -> None:
    tokens = ",".join(map(str, TOKENS))
    assert http.get("/api/v1/kv/lookup", params={"tokens": tokens, "model": NAME}).status_code == 200
    unknown = http.get("/api/v1/kv/lookup", params={"tokens": tokens, "model": "nothing"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "model")
    one, other = {"tokens": TOKENS, "model": NAME}, {"tokens": TOKENS}
    apart = http.post("/api/v1/kv/diverge", json={"first": one, "second": other}).json()
    assert (apart["same"], apart["same_namespace"], apart["reusable_tokens"]) == (True, False, 0)


def broken(folder: Path, change: Callable[[Path], object]) -> Path:
    write_adapter(folder, DEMO, seed=1)
    change(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]", encoding="utf-8"), "an object"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"r": 4096}', encoding="utf-8"), "rank 4096"),
        (
            lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LOHA"}', encoding="utf-8"),
            "LOHA",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 9), "adapter_model.safetensors"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(
                (folder / "adapter_model.safetensors").read_bytes()[:-1]
            ),
            "is cut",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(
                b"version https://git-lfs.github.com/spec/v1\n"
            ),
            "git lfs pull",
        ),
    ],
)
def test_a_folder_that_holds_no_adapter_is_refused_before_the_start(
    tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    settings = load_settings({"engine": {"lora_adapters": {NAME: str(broken(tmp_path / "lora", change))}}})
    with pytest.raises(SettingsError, match=r"engine\.lora_adapters") as refused:
        require_startable(settings)
    assert words in str(refused.value)
    assert len(str(refused.value)) <= 400


@pytest.mark.parametrize(
    ("adapters", "extra", "words"),
    [
        ({"demo": "x"}, {}, "own name"),
        ({"": "x"}, {}, "cannot be asked for"),
        ({"a\nb": "x"}, {}, "cannot be asked for"),
        ({"a": {"path": "x", "sha256": "y"}}, {}, "sha256"),
        ({"a": {"path": "x", "sha": "y"}}, {}, "sha"),
        ({"a": "x", "b": "x"}, {"max_cpu_loras": 1}, "max_cpu_loras"),
        ({}, {"enable_lora": True}, "engine.lora_adapters"),
    ],
)
def test_settings_that_cannot_work_are_refused(adapters: dict[str, Any], extra: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"engine": {"lora_adapters": adapters, "extra_args": extra}})
    assert words in str(refused.value)
