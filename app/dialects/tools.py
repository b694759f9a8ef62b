"""Tools: hosted ones are left out where there are functions too, grammars of custom tools become words.

A choice that allows some of the tools (`allowed_tools`) leaves these alone in the request. No parser of vLLM's holds a
model to such a choice, and what it has not read of it does not call.

Which tools a client can answer for differs by API: functions by all; custom tools and namespaces by Responses'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

from app.gate.request_context import current_request

Body = dict[str, Any]

_CLIENTS = ("function", "namespace", "custom")
"""Types of Responses' tools whose calls the client answers."""
_OF_CHATS = ("function", "custom")
_ALLOWED = "allowed_tools"


def read_empty(body: Body) -> None:
    """`tools: []` and `tools: null` are no tools; then `tool_choice` has nothing to choose, unless it must choose."""
    if "tools" in body and not body["tools"] and isinstance(body["tools"], list | None):
        del body["tools"]
        if body.get("tool_choice", "") in (None, "auto", "none"):
            del body["tool_choice"]


def read_responses(body: Body) -> None:
    """Of Responses. Raises VLLMValidationError (400) where no tool is left, or a hosted one is forced."""
    _leave_out_hosted(body, lambda tool: tool.get("type") in _CLIENTS, "of the type `function`")
    _leave_the_allowed(body)
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and _is_hosted_choice(choice):
        raise VLLMValidationError(
            "`tool_choice` names a tool that would run at the server, and this server runs none: name a function.",
            parameter="tool_choice",
        )
    for tool in _dicts(body.get("tools")):
        if tool.get("type") == "custom" and isinstance(tool.get("format"), dict):
            _put_into_words(tool, body)


def read_messages(body: Body) -> None:
    """Of Messages. Raises as `read_responses`."""
    _leave_out_hosted(body, _is_anthropic_client_tool, "with an `input_schema`")


def read_chat(body: Body) -> None:
    """Of chats, where only routers of many providers send hosted tools. Raises as `read_responses`."""
    _leave_out_hosted(body, lambda tool: tool.get("type", "function") in _OF_CHATS, "of the type `function`")
    _leave_the_allowed(body)


def _leave_out_hosted(body: Body, is_clients: Callable[[Body], bool], give: str) -> None:
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    kept = [tool for tool in tools if not isinstance(tool, dict) or is_clients(tool)]
    if len(kept) == len(tools):
        return
    left_out = [tool for tool in tools if isinstance(tool, dict) and not is_clients(tool)]
    if not kept:
        raise VLLMValidationError(
            f"This server runs no tools, such as {_name(left_out[0])[:64]!r}: give tools {give}, whose calls the "
            "client answers.",
            parameter="tools",
        )
    for tool in left_out:
        current_request().left_out.note("hosted_tool", _name(tool))
    body["tools"] = kept


def _leave_the_allowed(body: Body) -> None:
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED:
        return
    nested = choice.get(_ALLOWED)  # chats have an object of that name; Responses have its fields in the choice
    given = nested if isinstance(nested, dict) else choice
    mode, names = given.get("mode", "auto"), {_called(tool) for tool in _dicts(given.get("tools"))}
    if mode not in ("auto", "required"):
        raise VLLMValidationError("`tool_choice.mode` must be `auto` or `required`.", parameter="tool_choice")
    kept = [tool for tool in _dicts(body.get("tools")) if _called(tool) in names - {None}]
    if not kept:
        raise VLLMValidationError(
            "`tool_choice` allows no tool of `tools` whose calls the client answers.", parameter="tool_choice"
        )
    body["tools"], body["tool_choice"] = kept, mode


def _called(tool: Body) -> str | None:
    """A tool's name, in a chat or in Responses."""
    kind = tool.get("type")
    inner = tool.get(kind) if isinstance(kind, str) else None
    name = (inner if isinstance(inner, dict) else tool).get("name")
    return name if isinstance(name, str) else None


def _is_anthropic_client_tool(tool: Body) -> bool:
    """Whether the client runs it, as its own definition says; Anthropic's own tools have none."""
    callers = tool.get("allowed_callers")
    return tool.get("type") in (None, "custom") and (
        not isinstance(callers, list) or not callers or "direct" in callers
    )


def _name(tool: Body) -> str:
    kind = tool.get("type")
    if kind in (None, "custom"):
        callers = tool.get("allowed_callers")
        kind = callers[0] if isinstance(callers, list) and callers else kind
    return str(kind)


def _is_hosted_choice(choice: Body) -> bool:
    return isinstance(choice.get("type"), str) and choice["type"] not in (*_CLIENTS, "auto", "none")


def _put_into_words(tool: Body, body: Body) -> None:
    """The model is told a custom tool's grammar. It is not held to it, so a call of it cannot be forced."""
    form = tool["format"]
    if form.get("type") != "grammar":
        return
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise VLLMValidationError(
            "A custom tool's `format` of the type `grammar` has a `syntax`, `lark` or `regex`, and a `definition`.",
            parameter="tools",
        )
    choice, others = body.get("tool_choice"), [one for one in _dicts(body.get("tools")) if one.get("type") != "custom"]
    named = choice.get("name") if isinstance(choice, dict) else None
    if (choice == "required" and not others) or (named is not None and named == tool.get("name")):
        raise VLLMValidationError(
            "A custom tool's grammar cannot be enforced here, so `tool_choice` cannot force its call: use `auto`, or a "
            "function with `parameters`.",
            parameter="tool_choice",
        )
    said = tool.get("description")
    words = f"The input is a text of this {syntax} grammar:\n{definition}"
    tool["description"] = f"{said}\n{words}" if isinstance(said, str) and said else words
    tool["format"] = {"type": "text"}
    current_request().left_out.note("grammar", syntax)


def _dicts(value: Any) -> list[Body]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
