"""A choice that allows some of the tools: the model reads these alone, and is forced to one where it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bodies import ASK, CHAT_TOOL, CHATS, FUNCTION, RESPONSES, chat, response
from fake_backend import FakeReplicas
from vllm.exceptions import VLLMValidationError

from app.dialects.tools import read_chat, read_responses

EDIT = {"type": "function", "name": "edit", "parameters": {"type": "object", "properties": {"text": {}}}}
CUSTOM = {"type": "custom", "name": "patch"}
SEARCH = {"type": "web_search"}


def of_chat(tool: dict[str, Any]) -> dict[str, Any]:
    inner = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool["type"], tool["type"]: inner}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def in_chat(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {name: choice[name] for name in ("mode", "tools")}}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("names", [["look"], ["patch"], ["edit", "look"]])
def test_the_others_are_left_out_and_the_mode_is_the_choice(mode: str, names: list[str]) -> None:
    every = [FUNCTION, EDIT, CUSTOM]
    kept = [tool for tool in every if tool["name"] in names]
    named = [{"type": tool["type"], "name": tool["name"]} for tool in kept]
    body = {"tools": every, "tool_choice": allowed(mode, *named, SEARCH, {"type": "function", "name": "x"})}
    read_responses(body)
    assert body == {"tools": kept, "tool_choice": mode}
    body = {"tools": list(map(of_chat, every)), "tool_choice": in_chat(allowed(mode, *map(of_chat, named)))}
    read_chat(body)
    assert body == {"tools": list(map(of_chat, kept)), "tool_choice": mode}


@pytest.mark.parametrize(
    "choice",
    [
        allowed("none", FUNCTION),
        allowed(["auto"], FUNCTION),
        allowed("auto"),
        allowed("auto", {"type": "function", "name": "unknown"}),
        allowed("auto", {"type": "function"}, {"type": ["function"], "name": {}}, "look", None),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": "look"},
    ],
)
@pytest.mark.parametrize("read", [read_chat, read_responses])
def test_a_choice_that_allows_nothing_is_refused_by_its_name(
    read: Callable[[Any], None], choice: dict[str, Any]
) -> None:
    tools = [{**FUNCTION, "function": {"name": "look"}}, {"type": "function"}]
    with pytest.raises(VLLMValidationError, match="tool_choice"):
        read({"tools": tools, "tool_choice": choice})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat(ASK, tools=[CHAT_TOOL, of_chat(EDIT)], tool_choice=in_chat(allowed("required", CHAT_TOOL)))),
        (RESPONSES, response(ASK, tools=[FUNCTION, EDIT, SEARCH], tool_choice=allowed("required", FUNCTION, SEARCH))),
    ],
)
def test_a_call_that_must_be_is_of_an_allowed_tool(start: Any, path: str, body: dict[str, Any]) -> None:
    server = start(FakeReplicas(), engine={"tool_call_parser": "hermes"})
    with server.http() as client:
        answer = client.post(path, json=body)
        refused = client.post(path, json={**body, "tool_choice": allowed("auto")})
    assert answer.status_code == 200, answer.text
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    (request,) = server.replicas.requests
    grammar = str(request.sampling_params.structured_outputs)
    assert "place" in grammar
    assert "edit" not in grammar
