"""Fields of a body that this server would drop: refused with a reason, before vLLM reads the body.

A field is refused only where it changes what an answer means, so that no client believes it was obeyed. Fields that
cannot change it, such as hints and names, pass: `store` (nothing is stored), `prediction`, `service_tier`, `metadata`,
`user`, `safety_identifier`, `prompt_cache_key`, `verbosity`, `cache_control` (all is cached), `speed`, `max_tool_calls`
(of tools that run here). Each protocol's own module says which tools are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from fastapi import Request
from vllm.exceptions import VLLMValidationError

KEEPS_NOTHING = "This server keeps no responses: send the whole conversation as `input`."
_HARMLESS_EDIT = "clear_thinking_20251015"


def _any_edit(context: Any) -> bool:
    edits = context.get("edits") if isinstance(context, dict) else context
    each = edits if isinstance(edits, list) else [edits] if edits else []
    return any(not isinstance(edit, dict) or edit.get("type") != _HARMLESS_EDIT for edit in each)


class NotDone(NamedTuple):
    """A field, `why` it is refused, and whether a value of it `asks` for what is not done."""

    why: str
    asks: Callable[[Any], bool] = bool


_NAME, _TEMPLATE = "chat_template", "This server renders chats by its own template, the setting `chat_template`."
_TEXT_ONLY = "This server answers in text only."
_CONSTRAINED = "This server takes it as `structured_outputs`, or as `response_format`."
_CLIENTS_TOOLS = "give `tools`, whose calls the client answers."
_GUIDED = {
    name: NotDone(_CONSTRAINED, lambda value: value is not None)
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
}
_EVERYWHERE = {
    "structured_outputs": NotDone(
        "Its `whitespace_pattern` is taken by no backend here: `disable_any_whitespace` allows none, and "
        "`engine.json_whitespace` bounds it for all.",
        lambda value: isinstance(value, dict) and value.get("whitespace_pattern") is not None,
    ),
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params"),
        NotDone("It is what replicas tell each other: clients name prompts by their text."),
    ),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), NotDone("This server takes text only.")),
    "chat_template_kwargs": NotDone(
        f"Its `chat_template` is the server's. {_TEMPLATE}", lambda value: isinstance(value, dict) and _NAME in value
    ),
}
"""On every route: vLLM would take a prompt's tokens out of `kv_transfer_params`, and special ones among them."""
_OF_CHATS = {_NAME: NotDone(_TEMPLATE, lambda value: value is not None)}
TOKENIZE = {**_EVERYWHERE, **_OF_CHATS}
CHATS = {
    **_OF_CHATS,
    **_EVERYWHERE,
    "modalities": NotDone(_TEXT_ONLY, lambda value: value not in (None, [], ["text"])),
    "audio": NotDone(_TEXT_ONLY, lambda value: value is not None),
    "web_search_options": NotDone(f"This server searches nothing: {_CLIENTS_TOOLS}", lambda value: value is not None),
    "functions": NotDone("This server takes them as `tools`."),
    "function_call": NotDone(
        "This server takes it as `tool_choice`.", lambda value: value not in (None, "none", "auto")
    ),
    **_GUIDED,
}
COMPLETIONS = {
    **_EVERYWHERE,
    "prompt_embeds": NotDone("This server takes prompts of text or token ids only.", lambda value: value is not None),
    "best_of": NotDone(
        "This server samples no more answers than it gives: ask for `n`.", lambda value: value not in (None, 1)
    ),
    **_GUIDED,
}
RESPONSES = {
    **_EVERYWHERE,
    **dict.fromkeys(
        ("background", "previous_response_id", "previous_input_messages", "conversation", "prompt"),
        NotDone(KEEPS_NOTHING),
    ),
    "context_management": NotDone("This server compacts no conversations: send what the model is to read."),
    **_GUIDED,
}
MESSAGES = {
    **_EVERYWHERE,
    "mcp_servers": NotDone(f"This server calls no MCP servers: {_CLIENTS_TOOLS}"),
    "container": NotDone(f"This server runs no code and has no containers: {_CLIENTS_TOOLS}"),
    "output_format": NotDone("This server takes it as `output_config.format`."),
    "inference_geo": NotDone(
        "This server does not choose where it computes.", lambda value: value not in (None, "", "global")
    ),
    "context_management": NotDone("This server edits no conversations: send what the model is to read.", _any_edit),
}


def refuse(fields: Mapping[str, NotDone]) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """A check of a route (`app.gate.json_route`): raises VLLMValidationError (400), which names the field."""

    async def refuse_what_is_not_done(raw_request: Request) -> None:
        body = await raw_request.json()
        if not isinstance(body, dict):
            return
        for name, one in fields.items():
            if one.asks(body.get(name)):
                raise VLLMValidationError(f"`{name}` is not possible. {one.why}", parameter=name)

    return refuse_what_is_not_done
