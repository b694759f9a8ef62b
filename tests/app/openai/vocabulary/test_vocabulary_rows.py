"""Tokens that the tokenizer knows and the model has no row for: no engine ever reads one."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeReplicas, backend
from ingress_server import MODEL, Server, engine_args, serve
from tokenizers import AddedToken, Tokenizer
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from app.ingress import frontend_config
from app.openai.vocabulary.rows import require_rows
from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError

WORD, SPECIAL = "<added-word>", "<|added|>"


def grown(folder: Path, **config: Any) -> VllmConfig:
    """Of the demo model with two tokens that it has no rows for, whose tokenizer is configured so."""
    shutil.copytree(PROJECT_ROOT / "models" / "demo", folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([WORD])
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.save(str(path))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    args = engine_args()
    args.model = str(folder)
    return frontend_config(args)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return grown(tmp_path_factory.mktemp("grown") / "model")


@pytest.fixture(scope="module")
def server(config: VllmConfig) -> Iterator[Server]:
    with serve(config, backend(FakeReplicas())) as server:
        yield server


CHAT = {"model": MODEL, "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": f"The {SPECIAL} ball"}),
        ("/v1/completions", {"prompt": f"The {WORD} ball"}),
        ("/v1/completions", {"prompt": [5, 1148, 7]}),
        ("/v1/completions", {"prompt": [[5, 6], [5, 1149]]}),
        ("/v1/completions", {"prompt": "The ball", "bad_words": [WORD]}),
        ("/v1/completions", {"prompt": "The ball", "bad_words": [f"red {SPECIAL}"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"The {WORD}"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"The {WORD}"}], "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": WORD}, {"role": "user", "content": "Hi"}]},
        ),
        ("/v1/responses", {"input": f"The {WORD}"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": f"The {WORD}"}]}),
    ],
)
def test_what_has_a_token_without_a_row_is_400_and_no_replica_sees_it(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    most = {"max_output_tokens": 3} if path == "/v1/responses" else {"max_tokens": 3}
    before = len(server.replicas.requests)
    with server.http() as client:
        answer = client.post(path, json={"model": MODEL, **most, **body})
        assert answer.status_code == 400, answer.text
        assert "1148 tokens" in answer.json()["error"]["message"]
        seen = [request.prompt_token_ids for request in server.replicas.requests[before:]]
        assert [tokens for tokens in seen if max(tokens) >= 1148] == []
        harmless = client.post("/v1/completions", json={**CHAT, "prompt": "The red ball", "bad_words": ["blue"]})
    assert harmless.status_code == 200, harmless.text


def test_a_server_whose_other_tokens_are_rare_starts_and_says_so(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        require_rows(cached_tokenizer_from_config(config.model_config), None, config.model_config)
    assert "tokens up to 1149, and the model has rows for 1148" in caplog.text


OWN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("more", "template", "says"),
    [
        ({"eos_token": SPECIAL}, None, "end of answers"),
        ({"chat_template": SPECIAL + OWN}, None, "chat template"),
        ({"bos_token": SPECIAL, "chat_template": "{{ bos_token }}" + OWN}, None, "chat template"),
        ({"chat_template": OWN + "{% if tools %}" + WORD + "{% endif %}"}, None, "chat template"),
        ({"chat_template": "{{ '<|' ~ 'added' ~ '|>' }}" + OWN}, None, "chat template"),
        ({}, SPECIAL + OWN, "chat template"),
    ],
)
def test_a_model_whose_every_prompt_has_such_a_token_does_not_start(
    tmp_path: Path, more: dict[str, Any], template: str | None, says: str
) -> None:
    config = grown(tmp_path / "model", **more)
    with pytest.raises(SettingsError, match=rf"^model: its {says} uses token 114[89] \('<.*rows for 1148") as refused:
        require_rows(cached_tokenizer_from_config(config.model_config), template, config.model_config)
    assert "\n" not in str(refused.value)


def test_a_model_that_pads_with_such_a_token_starts(tmp_path: Path) -> None:
    config = grown(tmp_path / "model", pad_token=SPECIAL)
    require_rows(cached_tokenizer_from_config(config.model_config), None, config.model_config)
