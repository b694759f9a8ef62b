"""What is found out about a chat template at start, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.renderers import BaseRenderer, renderer_from_config

from app.answers.returns import Returns
from app.answers.turns import TurnMarks
from app.metrics.ingress import IngressMetrics
from app.openai.chat_renderer import remembered_answers, turn_marks
from configs.http_section import HTTPSettings

USER, ASSISTANT, END = 4, 5, 2
OPENS = "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
STRIPS_ANSWERS = (
    "{%- for m in messages -%}{%- if m.role == 'user' or loop.last -%}"
    "{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}" + OPENS
)
COUNTS_TURNS = (
    "{{- '<|system|>' + (messages | length | string) -}}"
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}" + OPENS
)
WITHOUT_MARKS = (
    "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
)
RAISES = "{{- raise_exception('no') -}}"


@pytest.fixture(scope="module")
def renderer(vllm_config: VllmConfig) -> Iterator[BaseRenderer]:
    made = renderer_from_config(vllm_config)
    yield made
    made.shutdown()


def test_the_demo_model_appends(renderer: BaseRenderer):
    marks = turn_marks(renderer, None)
    assert isinstance(marks, TurnMarks)
    assert (marks.start, marks.append_only) == (ASSISTANT, True)
    assert {USER, ASSISTANT, END} <= marks.boundaries


@pytest.mark.parametrize("template", [STRIPS_ANSWERS, COUNTS_TURNS])
def test_a_template_that_changes_what_it_has_rendered_is_found_out(renderer: BaseRenderer, template: str):
    marks = turn_marks(renderer, template)
    assert isinstance(marks, TurnMarks)
    assert not marks.append_only


@pytest.mark.parametrize(("template", "why"), [(WITHOUT_MARKS, "no special token"), (RAISES, "does not render")])
def test_what_has_no_marks_is_left_alone_in_words(renderer: BaseRenderer, template: str, why: str):
    marks = turn_marks(renderer, template)
    assert isinstance(marks, str)
    assert why in marks


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(backend_tokenizer=None)])
def test_a_tokenizer_that_cannot_be_asked_is_left_alone(tokenizer: Any):
    fake: Any = SimpleNamespace(tokenizer=tokenizer)
    assert isinstance(turn_marks(fake, None), str)


@pytest.mark.parametrize(
    ("template", "wanted", "splices", "said"),
    [
        (None, "auto", True, "are put back into"),
        (None, "never", False, "are not put back"),
        (STRIPS_ANSWERS, "auto", False, "not append-only"),
        (STRIPS_ANSWERS, "always", True, "are put back into"),
        (WITHOUT_MARKS, "always", None, "not given back"),
    ],
)
def test_one_line_says_what_becomes_of_answers(
    renderer: BaseRenderer,
    caplog: pytest.LogCaptureFixture,
    own_records: Any,
    template: str | None,
    wanted: str,
    splices: bool | None,
    said: str,
):
    http = HTTPSettings(splice_answers=wanted)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="app.openai.chat_renderer"):
        rendering: Any = SimpleNamespace(renderer=renderer, chat_template=template, chat_template_content_format="auto")
        answers = remembered_answers(rendering, http, Returns("auto"), IngressMetrics(CollectorRegistry()))
    assert (answers.splices if answers else None) is splices
    (line,) = own_records()
    assert said in line.getMessage()
