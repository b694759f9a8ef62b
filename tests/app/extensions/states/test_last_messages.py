"""Where a prompt's last message begins, by what the chat template begins messages with; and nothing where it is not
known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import FakeReplicas, backend
from ingress_server import MODEL, serve
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer, renderer_from_config

from app.extensions import ingress_extensions
from app.extensions.states.ingress import MessageMark, message_mark
from app.gate.prompt_extra import FrontParts
from configs.settings import load_settings
from kvmanager.extensions.states.landings import STATES

SYSTEM, USER, DOC = 3, 4, 6


def each(message: str, asks: str) -> str:
    """A chat template that writes every message alike."""
    begins = "{%- if add_generation_prompt -%}{{- '" + asks + "' -}}{%- endif -%}"
    return "{%- for m in messages -%}{{- " + message + " -}}{%- endfor -%}" + begins


ONE_MARK = each("'<|doc|>' + m.role + ' ' + m.content + '<|end|>'", "<|doc|>assistant ")
HEADERS = each("'<|doc|>' + m.role + '<|system|>' + m.content + '<|end|>'", "<|doc|>assistant<|system|>")
ONLY_AT_FIRST = "{{- '<|system|>' -}}" + each("m.role + ': ' + m.content + '. '", "assistant: ")
NO_MARKS = each("m.role + ': ' + m.content + '. '", "assistant: ")
RAISES = "{{- raise_exception('no') -}}"
QUESTIONS = ("Where is the red ball?", "Who has the blue box?")
DOCUMENT = {"role": "system", "content": "Anna lives in Paris. The red ball belongs to Anna."}


@pytest.fixture(scope="module")
def renderer(vllm_config: VllmConfig) -> Iterator[BaseRenderer]:
    made = renderer_from_config(vllm_config)
    yield made
    made.shutdown()


def rendered(renderer: BaseRenderer, template: str | None, *messages: dict[str, str], asks: bool = True) -> list[int]:
    request = ChatCompletionRequest.model_validate({"messages": list(messages), "add_generation_prompt": asks})
    params = request.build_chat_params(template, "auto").with_defaults({"tools": None, "tokenize": False})
    prompt: Any = renderer.render_messages(request.messages, params)[1]["prompt"]
    tokenizer: Any = renderer.tokenizer
    return list(tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "mark"),
    [(None, MessageMark(USER, 0)), (ONE_MARK, MessageMark(DOC, 1)), (HEADERS, MessageMark(SYSTEM, 1))],
    ids=["by role", "one for all roles", "around the role"],
)
def test_the_template_says_what_begins_a_message_and_all_before_the_last_one_is_alike(
    renderer: BaseRenderer, template: str | None, mark: MessageMark
) -> None:
    assert message_mark(renderer, template) == mark
    for before in (
        [DOCUMENT],
        [DOCUMENT, {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}],
    ):
        first, second = (
            rendered(renderer, template, *before, {"role": "user", "content": question}) for question in QUESTIONS
        )
        begins = mark.last_message(first)
        assert first[:begins] == second[:begins]
        assert mark.last_message(second) == begins
        assert begins >= len(rendered(renderer, template, *before, asks=False)), "nothing of it is left out"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (ONLY_AT_FIRST, "token 3 does not begin every message in its chat template"),
        (NO_MARKS, "no special token begins a message in its chat template"),
        (RAISES, "its chat template does not render a plain conversation"),
    ],
)
def test_a_template_that_does_not_mark_messages_is_said_in_words(
    renderer: BaseRenderer, template: str, why: str
) -> None:
    said = message_mark(renderer, template)
    assert isinstance(said, str)
    assert said.startswith(why)


def test_a_tokenizer_without_special_tokens_is_said_in_words() -> None:
    bare: Any = SimpleNamespace(tokenizer=SimpleNamespace())
    assert "special tokens" in str(message_mark(bare, None))


@pytest.mark.parametrize(
    ("tokens", "begins"),
    [([], 0), ([9] * 5, 0), ([4, 9, 9], 0), ([9, 4, 9, 5, 9], 1), ([1, 4, 9, 4, 9, 4], 3), ([4] * 100_000, 99_998)],
    ids=["nothing", "no mark", "one alone", "one", "some", "nothing else"],
)
def test_a_prompt_of_any_tokens_has_a_place_within_it_or_none(tokens: list[int], begins: int) -> None:
    assert MessageMark(4, 1 if tokens.count(4) > 1 else 0).last_message(tokens) == begins


@pytest.mark.parametrize(
    ("has_states", "paths", "known"), [(True, ["states"], True), (False, ["states"], False), (True, [], False)]
)
def test_prompts_bring_the_place_only_to_engines_with_states(
    renderer: BaseRenderer, has_states: bool, paths: list[str], known: bool
) -> None:
    settings = load_settings({"model": "made/up", "kv": {"load_paths": paths}})
    extension = ingress_extensions(settings)[STATES]
    stand_in: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=has_states),
        tokenizer=renderer.tokenizer,
        render_messages=renderer.render_messages,
    )
    extra = extension.extra(FrontParts(None, stand_in, None, SimpleNamespace()))  # type: ignore[arg-type]
    prompt = rendered(renderer, None, DOCUMENT, {"role": "user", "content": QUESTIONS[0]})
    request: Any = SimpleNamespace(prompt_token_ids=prompt)
    begins = asyncio.run(extra.of(request, None, SimpleNamespace()))  # type: ignore[arg-type]
    assert begins == (MessageMark(USER, 0).last_message(prompt) if known else None)
    one: Any = SimpleNamespace(prompt_token_ids=prompt[begins:])
    assert asyncio.run(extra.of(one, None, SimpleNamespace())) is None, "of one message alone"  # type: ignore[arg-type]
    parts: Any = None
    assert (extension.preparation(parts), extension.router(extra, None, parts)) == (None, None)


def test_a_chat_of_any_dialect_reaches_its_replica_with_the_place_of_its_last_message(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, replicas, question = DOCUMENT["content"], FakeReplicas(), {"role": "user", "content": QUESTIONS[0]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [DOCUMENT, question], "max_tokens": 3},
        "/v1/responses": {"instructions": document, "input": QUESTIONS[0], "max_output_tokens": 3},
        "/v1/messages": {"system": document, "messages": [question], "max_tokens": 3},
    }
    monkeypatch.setattr(ModelConfig, "is_hybrid", True)
    with serve(vllm_config, backend(replicas)) as server, server.http() as client:
        for path, body in bodies.items():
            answer = client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
            sent = replicas.requests[-1]
            begins = sent.extras[STATES]
            assert sent.prompt_token_ids[begins] == USER
            assert USER not in sent.prompt_token_ids[begins + 1 :]
        client.post("/v1/completions", json={"model": MODEL, "prompt": "Anna lives in", "max_tokens": 3})
        assert STATES not in replicas.requests[-1].extras
