"""A developer's message that comes late changes nothing in front of it, where the template allows that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bodies import ASK, CHATS, ON, RESPONSES, chat, response
from fake_backend import FakeReplicas
from vllm.renderers.hf import _consolidate_system_messages, _convert_developer_to_system

from app.dialects.templates import in_place, prints_system_in_place

NOTES = {"role": "system", "content": "Be brief."}
LATE = {"role": "developer", "content": "The folder is another one."}
SAID = {"role": "assistant", "content": "In Oslo."}
Template = Callable[[list[dict[str, Any]]], str]


def prints(messages: list[dict[str, Any]]) -> str:
    return "".join(f"{each['role']}: {each['content']}\n" for each in messages)


def knows_the_first(messages: list[dict[str, Any]]) -> str:
    return prints([each for number, each in enumerate(messages) if number == 0 or each["role"] != "system"])


def wants_the_first(messages: list[dict[str, Any]]) -> str:
    if any(each["role"] == "system" for each in messages[1:]):
        raise ValueError("the system's message comes first")
    return prints(messages)


def renderer(template: Template, knows_developers: bool = False) -> Any:
    """vLLM's, as far as it treats developers."""

    def render_messages(messages: list[Any], params: Any) -> tuple[Any, Any]:
        given: Any = list(messages)
        if not knows_developers and any(each["role"] == "developer" for each in given):
            given = _consolidate_system_messages(_convert_developer_to_system(given))
        return given, {"prompt": template(given)}

    return SimpleNamespace(render_messages=render_messages)


@pytest.mark.parametrize(
    ("template", "knows_developers", "found"),
    [(prints, False, True), (prints, True, False), (knows_the_first, False, False), (wants_the_first, False, False)],
)
def test_a_template_that_prints_systems_where_they_stand_is_found(
    template: Template, knows_developers: bool, found: bool
) -> None:
    assert prints_system_in_place(renderer(template, knows_developers), None, "string") == found


@pytest.mark.parametrize(
    ("messages", "placed"),
    [
        ([NOTES, LATE, ASK], [NOTES, LATE, ASK]),
        ([NOTES, ASK, NOTES, ASK], [NOTES, ASK, NOTES, ASK]),
        ([ASK, SAID, LATE, ASK], [ASK, SAID, {**LATE, "role": "system"}, ASK]),
        (
            [NOTES, {"role": "developer", "content": [{"type": "text", "text": "a"}, "b"]}, ASK, LATE, ASK],
            [{"role": "system", "content": "Be brief.\n\na\nb"}, ASK, {**LATE, "role": "system"}, ASK],
        ),
        ([{"role": "developer", "content": None}, None, LATE], [{"role": "system", "content": ""}, None,
                                                                {**LATE, "role": "system"}]),
    ],
)  # fmt: skip
def test_late_orders_stay_and_those_at_the_head_are_one(messages: list[Any], placed: list[Any]) -> None:
    assert in_place(messages) == placed


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_late_order_leaves_the_prompt_before_it_as_it_was(start: Any, tmp_path: Path, path: str) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")
    server = start(FakeReplicas(), chat_template=str(template))
    earlier = [NOTES, {"role": "developer", "content": "Ask first."}, ASK]
    body = chat if path == CHATS else response
    with server.http() as client:
        for messages in (earlier, [*earlier, SAID, LATE, ON]):
            answer = client.post(path, json=body(*messages))
            assert answer.status_code == 200, answer.text
    before, after = (request.prompt_token_ids for request in server.replicas.requests)
    assert after[: len(before)] == before
