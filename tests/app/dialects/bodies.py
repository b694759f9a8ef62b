"""Bodies as agents send them, and what each says in plainer words: both make the same prompt."""

from __future__ import annotations

import base64
from typing import Any

from ingress_server import MODEL

CHATS, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNTED = "/v1/messages/count_tokens"
ASK = {"role": "user", "content": "Where is the red ball?"}
ON = {"role": "user", "content": "Go on."}
DOCUMENT = {
    "type": "document",
    "title": "Notes",
    "source": {"type": "text", "media_type": "text/plain", "data": "A mill."},
}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
TOOL = {"name": "look", "input_schema": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PICTURE_URL = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}
INPUT_PICTURE = {"type": "input_image", "image_url": "http://127.0.0.1:9/x"}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": 3, **more}


message = chat


def response(*items: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": list(items), "max_output_tokens": 3, **more}


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def returned(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content}


USED = said({"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "mill"}}, role="assistant")
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"place": "mill"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place": "mill"}'}}
ANSWER = {"type": "message", "role": "assistant", "content": "In Oslo."}
FOUND = {"type": "search_result", "title": "Lamps", "source": "notes/1", "content": [text("A mill.")]}
ENCODED = base64.b64encode(b"A mill.").decode()

SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (MESSAGES, message(said(DOCUMENT)), message(said(text("Notes\nA mill.")))),
    (
        MESSAGES,
        message(said({"type": "document", "source": {"type": "content", "content": [text("A "), text("mill.")]}})),
        message(said(text("A \nmill."))),
    ),
    (
        MESSAGES,
        message(said({"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": ENCODED}})),
        message(said(text("A mill."))),
    ),
    (MESSAGES, message(ASK, USED, said(returned([DOCUMENT]))), message(ASK, USED, said(returned("Notes\nA mill.")))),
    (MESSAGES, message(said(FOUND)), message(said(text("Lamps\nnotes/1\nA mill.")))),
    (MESSAGES, message(ASK, USED, said(returned(FOUND))),
     message(ASK, USED, said(returned("Lamps\nnotes/1\nA mill.")))),
    (
        MESSAGES,
        message(
            ASK,
            said(
                text("I look."),
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "ball"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s1",
                    "content": [
                        {"type": "web_search_result", "title": "T", "url": "http://a", "encrypted_content": "x" * 99}
                    ],
                },
                role="assistant",
            ),
            ON,
        ),
        message(
            ASK,
            said(
                text("I look."),
                text('[web_search]\n{"query": "ball"}'),
                text('[web_search_tool_result]\n[{"title": "T", "url": "http://a"}]'),
                role="assistant",
            ),
            ON,
        ),
    ),
    (
        MESSAGES,
        message(ASK, said({"type": "tool_use", "id": "t1", "name": "look", "input": '{"place": "mill"}'},
                          role="assistant"), said(returned("Found."))),
        message(ASK, USED, said(returned("Found."))),
    ),
    (MESSAGES, message(ASK, tools=[], system=None, temperature=None), message(ASK)),
    (
        MESSAGES,
        message(ASK, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}]),
        message(ASK, tools=[TOOL]),
    ),
    (CHATS, chat(ASK, tools=[], tool_choice="auto"), chat(ASK)),
    (CHATS, chat(ASK, tools=None), chat(ASK)),
    (CHATS, chat(ASK, tools=[{"type": "web_search"}, CHAT_TOOL]), chat(ASK, tools=[CHAT_TOOL])),
    (
        CHATS,
        chat(
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": None},
        ),
        chat(
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ),
    ),
    (
        CHATS,
        chat(ASK, said({"type": "reasoning", "text": "Hm."}, text("Oslo."), role="assistant"), ON),
        chat(ASK, {"role": "assistant", "content": "Oslo.", "reasoning": "Hm."}, ON),
    ),
    (
        CHATS,
        chat(
            ASK,
            said(text("I look."), {"type": "tool_use", "id": "c1", "name": "look", "input": {"place": "mill"}},
                 role="assistant"),
            {"role": "tool", "tool_call_id": "c1", "content": "Found."},
        ),
        chat(
            ASK,
            {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "Found."},
        ),
    ),
    (
        CHATS,
        chat(ASK, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
             said({"type": "tool_result", "tool_use_id": "c1", "content": [text("Found.")]}, text("And?"))),
        chat(ASK, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
             {"role": "tool", "tool_call_id": "c1", "content": "Found."}, said(text("And?"))),
    ),
    (
        CHATS,
        chat(ASK, {"role": "assistant", "content": None, "tool_calls": [
            {**CALLED, "function": {"name": "look", "arguments": {"place": "mill"}}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "Found."}),
        chat(ASK, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
             {"role": "tool", "tool_call_id": "c1", "content": "Found."}),
    ),
    (CHATS, chat(said(DOCUMENT, text("?"))), chat(said(text("Notes\nA mill."), text("?")))),
    (
        CHATS,
        chat(said({"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{ENCODED}"}})),
        chat(said(text("a.txt\nA mill."))),
    ),
    (RESPONSES, response(ASK, tools=[]), response(ASK)),
    (RESPONSES, response(ASK, tools=[FUNCTION, {"type": "web_search"}]), response(ASK, tools=[FUNCTION])),
    (RESPONSES, response(ASK, said({"type": "output_text", "text": "In Oslo."}, role="assistant"), ON),
     response(ASK, ANSWER, ON)),
    (RESPONSES, response(ASK, {**said({"type": "output_text", "text": "In Oslo."}, role="assistant"), "id": None,
                               "status": None, "phase": None}, ON), response(ASK, ANSWER, ON)),
    (RESPONSES, response(ASK, {**said({"type": "output_text", "text": "In Oslo.", "annotations": None,
                                       "logprobs": None}, role="assistant"), "type": "message"}, ON),
     response(ASK, ANSWER, ON)),
    (RESPONSES, response(ASK, {**said({"type": "refusal", "refusal": "In Oslo."}, role="assistant"),
                               "type": "message"}, ON), response(ASK, ANSWER, ON)),
    (RESPONSES, response(ASK, said(text("In Oslo."), role="assistant"), said(text("Go on."))),
     response(ASK, ANSWER, ON)),
    (RESPONSES, response(ASK, {"type": "message", "role": "assistant", "content": []}, ON), response(ASK, ON)),
    (RESPONSES, response(ASK, {"type": "message", "role": "assistant", "content": None}, ON), response(ASK, ON)),
    (RESPONSES, response(ASK, {"role": "user", "content": []}, ON), response(ASK, ON)),
    (RESPONSES, response(ASK, {**CALL, "id": None, "status": None}, ON), response(ASK, CALL, ON)),
    (RESPONSES, response(ASK, {**CALL, "arguments": {"place": "mill"}}, ON), response(ASK, CALL, ON)),
    (
        RESPONSES,
        response(ASK, CALL, {"type": "function_call_output", "call_id": "c1", "output": None}, ON),
        response(ASK, CALL, {"type": "function_call_output", "call_id": "c1", "output": ""}, ON),
    ),
    (
        RESPONSES,
        response(ASK, {"type": "local_shell_call", "id": "l1", "call_id": "c1", "status": "completed",
                       "action": {"type": "exec", "command": ["ls"]}},
                 {"type": "local_shell_call_output", "call_id": "c1", "output": "list.txt"}, ON),
        response(ASK, {**CALL, "name": "local_shell", "arguments": '{"action": {"command": ["ls"]}}'},
                 {"type": "function_call_output", "call_id": "c1", "output": "list.txt"}, ON),
    ),
    (
        RESPONSES,
        response(ASK, {"type": "mcp_call", "id": "c1", "server_label": "s", "name": "tidy", "arguments": "{}",
                       "output": "tidied", "error": None}, ON),
        response(ASK, {**CALL, "name": "tidy", "arguments": "{}"},
                 {"type": "function_call_output", "call_id": "c1", "output": "tidied"}, ON),
    ),
    (RESPONSES, response(ASK, {"type": "mcp_list_tools", "id": "m1", "server_label": "s", "tools": []}, ON),
     response(ASK, ON)),
    (RESPONSES, response(ASK, {"type": "reasoning", "id": "rs_1", "summary": [], "content": None,
                               "encrypted_content": "gAAAA"}, ON), response(ASK, ON)),
    (RESPONSES, response(ASK, {"type": "compaction", "encrypted_content": "gAAAA"}, ON), response(ASK, ON)),
    (
        RESPONSES,
        response(ASK, background=None, truncation=None, service_tier=None, tools=None, text=None, reasoning=None,
                 instructions=None, metadata=None, store=None, include=None, stream=None, tool_choice=None),
        response(ASK),
    ),
    (RESPONSES, response(ASK, service_tier="fast", include=["web_search_call.action.sources"]), response(ASK)),
]  # fmt: skip

TAKEN: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, response(ASK, {"type": kind, "id": "x1", **more}, ON))
    for kind, more in [
        ("web_search_call", {"status": "completed", "action": {"type": "search", "query": "tidy"}}),
        ("file_search_call", {"queries": ["list"], "results": None}),
        ("file_search_call", {"queries": ["list"], "results": [{"text": "a", "filename": "b"}]}),
        ("code_interpreter_call", {"code": "1", "outputs": [{"type": "logs", "logs": "2"}]}),
        ("image_generation_call", {"result": "AAAA" * 1000}),
        ("computer_call", {"call_id": "c", "action": {"type": "click", "x": 1, "y": 2}}),
        ("computer_call_output", {"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "http://a"}}),
        ("tool_search_call", {"call_id": None, "execution": "server", "arguments": {"query": "tidy"}}),
        ("tool_search_output", {"call_id": "c", "tools": [FUNCTION]}),
        ("shell_call", {"call_id": "c", "action": {"commands": ["ls"]}}),
        ("shell_call_output", {"call_id": "c", "output": [{"stdout": "a", "stderr": ""}]}),
        ("apply_patch_call", {"call_id": "c", "operation": {"type": "delete_file", "path": "a"}}),
        ("apply_patch_call_output", {"call_id": "c", "status": "completed"}),
        ("custom_tool_call", {"call_id": "c", "name": "edit", "input": "keep"}),
        ("mcp_approval_request", {"name": "a", "arguments": "{}", "server_label": "s"}),
    ]
]
