"""What the separators are: found in the chat template, or as the settings say, and in words where they cannot work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.renderers import BaseRenderer, renderer_from_config

from app.extensions.blend.separators import find_separators
from configs.errors import SettingsError

END, SYSTEM, USER, ASSISTANT, DOC = 2, 3, 4, 5, 6
SPECIAL = (0, 1, END, SYSTEM, USER, ASSISTANT, DOC)
IGNORES_DOCUMENTS = "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}"
LISTS_DOCUMENTS = (
    "{{- '<|system|>' -}}{%- for d in documents -%}{{- d.text + '\n' -}}{%- endfor -%}" + IGNORES_DOCUMENTS
)
TURNS_OF_DOCUMENTS = (
    "{%- for d in documents -%}{{- '<|system|>' + d.title + '<|assistant|>' + d.text + '<|end|>' -}}{%- endfor -%}"
    + IGNORES_DOCUMENTS
)
RAISES = "{{- raise_exception('no') -}}"


@pytest.fixture(scope="module")
def renderer(vllm_config: VllmConfig) -> Iterator[BaseRenderer]:
    made = renderer_from_config(vllm_config)
    yield made
    made.shutdown()


@pytest.mark.parametrize(
    ("template", "sequences", "said"),
    [
        (None, [(DOC,)], "<|doc|>, the chat template's document token"),
        (TURNS_OF_DOCUMENTS, [(ASSISTANT,)], "<|assistant|>, the chat template's document token"),
        (IGNORES_DOCUMENTS, [(token,) for token in SPECIAL], "any special token"),
        (LISTS_DOCUMENTS, [(token,) for token in SPECIAL], "any special token"),
        (RAISES, [(token,) for token in SPECIAL], "any special token"),
    ],
)
def test_the_template_says_what_begins_a_document(
    renderer: BaseRenderer,
    caplog: pytest.LogCaptureFixture,
    own_records: Any,
    template: str | None,
    sequences: list[tuple[int, ...]],
    said: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="app.extensions.blend.separators"):
        found = find_separators(None, renderer, template)

    assert found.sequences == sequences
    assert found.boundaries == set(SPECIAL)
    assert said in own_records()[-1].getMessage()


def test_settings_may_say_texts_and_token_ids(
    renderer: BaseRenderer, caplog: pytest.LogCaptureFixture, own_records: Any
) -> None:
    with caplog.at_level(logging.INFO, logger="app.extensions.blend.separators"):
        found = find_separators(["<|doc|>", [9, 10], "<|user|><|doc|>"], renderer, None)
        none = find_separators([], renderer, None)

    assert found.sequences == [(USER, DOC), (9, 10), (DOC,)]
    assert [record.getMessage() for record in own_records()] == [
        "chunks of blended prompts begin with '<|doc|>', the tokens [9, 10], '<|user|><|doc|>' (blending.separators)",
        "chunks of blended prompts begin with nothing (blending.separators)",
    ]
    assert none.sequences == []


def test_a_text_that_merges_is_warned_about(renderer: BaseRenderer, caplog: pytest.LogCaptureFixture) -> None:
    find_separators([" Anna"], renderer, None)
    assert [record.levelname for record in caplog.records if "merges" in record.message] == ["WARNING"]
    assert "' Anna'" in caplog.text


def fake(encode: Any) -> Any:
    tokenizer = SimpleNamespace(encode=encode) if encode else None
    return SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(get_vocab_size=lambda: 100))


@pytest.mark.parametrize(
    ("separator", "encode", "why"),
    [
        ("###", lambda text, add_special_tokens: [], "the tokenizer makes no token of '###'"),
        ([5, 100], None, "100 is no token of the model, whose ids are below 100"),
        ("###", None, "no tokenizer for '###'"),
    ],
)
def test_what_cannot_occur_in_a_prompt_is_refused_in_words(separator: Any, encode: Any, why: str) -> None:
    with pytest.raises(SettingsError, match=r"^blending\.separators: .*" + why):
        find_separators([separator], fake(encode), None)


def test_a_tokenizer_that_knows_no_special_tokens_has_no_separators() -> None:
    assert find_separators(None, fake(lambda text, add_special_tokens: [1]), None).sequences == []
