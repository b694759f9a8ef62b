"""Codex and Claude Code, as their requests look: thirty turns of each against a server.

A turn's body has what the agent sends by itself, changing fields included. Its history has the server's own answers as
they came, and a script of what the agent has thought, called and been told in between. Every tenth turn is a new
question; the others go on with the work on the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from app.cli.demo.documents import FACTS
from load_tests.harness.patience import patience

Json = dict[str, Any]

TURNS = 30
QUESTION_EACH = 10
_ANSWER_TOKENS = 12
_PEOPLE = list(FACTS)
_NOTES = " ".join(sentence for name in _PEOPLE[:20] for sentence in FACTS[name])
_SCHEMA = "https://json-schema.org/draft/2020-12/schema"
_LARK = 'start: begin_patch hunk+ end_patch\nbegin_patch: "*** Begin Patch" LF\nend_patch: "*** End Patch" LF?'


@dataclass(frozen=True)
class Turn:
    """One request: its status, what the server said where it refused it, and the tokens of its prompt."""

    status: int
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Agent(Protocol):
    """`body` is that of the next request; `hear` reads the answer to it, and adds to the history what comes next."""

    path: str
    headers: dict[str, str]

    def body(self, turn: int) -> Json: ...

    def hear(self, turn: int, events: list[Json]) -> tuple[int, int]: ...


def is_question(turn: int) -> bool:
    """Whether the user asks something new, and the agent does not go on by itself."""
    return turn % QUESTION_EACH == 0


def replay(url: str, agent: Agent) -> Iterator[Turn]:
    """All turns, up to one that is refused; at one replica, which another one's KV reaches in whole segments only."""
    headers = {**agent.headers, "X-CrossKV-Replica": "0"}
    with httpx.Client(base_url=url, headers=headers, timeout=patience(60)) as client:
        for turn in range(TURNS):
            answer = client.post(agent.path, json=agent.body(turn))
            if answer.is_error:
                yield Turn(answer.status_code, answer.text)
                return
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            yield Turn(answer.status_code, "", *agent.hear(turn, [json.loads(line) for line in lines]))


def _told(turn: int) -> str:
    """What a tool answers."""
    return " ".join(FACTS[_PEOPLE[turn]])


def _question(turn: int) -> str:
    return f"Where does {_PEOPLE[turn]} live?"


class Codex:
    """OpenAI's Responses: streamed, without a store, the whole history each time."""

    path = "/v1/responses"
    headers = {"originator": "codex_cli_rs", "session_id": "0198-7c1d", "user-agent": "codex_cli_rs/0.60.1"}  # noqa: RUF012

    def __init__(self, model: str) -> None:
        self._model = model
        self._items: list[Json] = [
            _item("developer", "<permissions instructions>\nAsk before you write.\n</permissions instructions>"),
            _item("user", "<environment_context>\n<cwd>/home</cwd>\n</environment_context>"),
            _item("user", _question(0)),
        ]

    def body(self, turn: int) -> Json:
        function: Json = {"type": "function", "strict": False}
        return {
            "model": self._model, "instructions": _NOTES, "input": self._items, "stream": True, "store": False,
            "tools": [
                {**function, "name": "shell", "description": "Runs a command.", "parameters": {
                    "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                    "required": ["command"], "additionalProperties": False}},
                {**function, "name": "update_plan", "description": "Says the plan.", "parameters": {
                    "type": "object", "properties": {"explanation": {"type": ["string", "null"]}}}},
                {"type": "custom", "name": "apply_patch", "description": "Edits files.",
                 "format": {"type": "grammar", "syntax": "lark", "definition": _LARK}},
                {"type": "web_search", "external_web_access": False},
                {"type": "image_generation", "output_format": "png"},
            ],
            "tool_choice": "auto", "parallel_tool_calls": False, "service_tier": None,
            "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0198-7c1d",
            "client_metadata": {"x-codex-turn-metadata": json.dumps({"turn": turn})},
            "max_output_tokens": _ANSWER_TOKENS, "temperature": 0,  # not Codex's: the model's answers have no end
        }  # fmt: skip

    def hear(self, turn: int, events: list[Json]) -> tuple[int, int]:
        answer = events[-1]["response"]
        thought = {"type": "reasoning", "id": f"rs_{turn}", "content": None, "encrypted_content": "gAAAAAB" + "x" * 64,
                   "summary": [{"type": "summary_text", "text": f"I look at note {turn}."}]}  # fmt: skip
        came = [item for item in answer["output"] if item["type"] == "message"]
        self._items += [thought, *came]
        self._items += [_item("user", _question(turn + 1))] if is_question(turn + 1) else self._steps(turn)
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def _steps(self, turn: int) -> list[Json]:
        """What Codex did: mostly in its shell, sometimes by another tool; and messages in other shapes."""
        call: Json = {"call_id": f"call_{turn}"}
        arguments = json.dumps({"command": ["cat", f"note-{turn}"]})
        done = {"type": "function_call_output", **call, "output": _told(turn)}
        shell = [{"type": "function_call", **call, "name": "shell", "arguments": arguments}, done]
        others: dict[int, list[Json]] = {
            1: [{"type": "local_shell_call", **call, "status": "completed",
                 "action": {"type": "exec", "command": ["cat"], "env": None}}, done],
            2: [{"type": "custom_tool_call", **call, "status": "completed", "name": "apply_patch",
                 "input": "*** Begin Patch\n*** End Patch"},
                {"type": "custom_tool_call_output", **call, "output": _told(turn)}],
            3: [{"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "Oslo"}},
                *shell],
            4: [{**shell[0], "id": None, "status": None},
                {**done, "output": [{"type": "input_text", "text": _told(turn)}]}],
            5: [{"role": "assistant", "content": [{"type": "output_text", "text": _told(turn)}]},
                _item("user", "Go on.")],
            6: [{"type": "message", "role": "assistant", "content": []}, *shell],
            7: [*shell, _item("developer", "<cwd>/home/notes</cwd>")],
        }  # fmt: skip
        return others.get(turn % QUESTION_EACH, shell)


class ClaudeCode:
    """Anthropic's Messages: streamed, with a billing line that differs each time, and marks for a cache that move."""

    path = "/v1/messages?beta=true"
    headers = {  # noqa: RUF012
        "anthropic-version": "2023-06-01", "x-app": "cli", "user-agent": "claude-cli/2.1.45 (external, cli)",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    }  # fmt: skip

    def __init__(self, model: str) -> None:
        self._model = model
        reminder = f"<system-reminder>\n{_told(29)}\n</system-reminder>"
        self._messages: list[Json] = [{"role": "user", "content": [_block(reminder), _block(_question(0))]}]

    def body(self, turn: int) -> Json:
        marked: Json = {"cache_control": {"type": "ephemeral"}}
        *before, last = self._messages
        content = last["content"]
        blocks = [_block(content)] if isinstance(content, str) else content
        return {
            "model": self._model, "stream": True,
            "system": [
                _block(f"x-anthropic-billing-header: cc_version=2.1.45.{turn:03x}; cc_entrypoint=cli; cch={turn:05x};"),
                {**_block("You are Claude Code."), **marked},
                {**_block(_NOTES), "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "messages": [*before, {**last, "content": [*blocks[:-1], {**blocks[-1], **marked}]}],
            "tools": [
                {"name": "Read", "description": "Reads a file.", "input_schema": {
                    "$schema": _SCHEMA, "type": "object", "properties": {"file_path": {"type": "string"}},
                    "required": ["file_path"], "additionalProperties": False}},
                {"name": "Bash", "description": "Runs a command.", "eager_input_streaming": True, "input_schema": {
                    "$schema": _SCHEMA, "type": "object", "properties": {"command": {"type": "string"}}}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            "metadata": {"user_id": f"user_1_account__session_{turn}"},
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "max_tokens": _ANSWER_TOKENS, "temperature": 0,  # not Claude Code's: the model's answers have no end
        }  # fmt: skip

    def hear(self, turn: int, events: list[Json]) -> tuple[int, int]:
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        came = [_block(text)] if text else []
        thought = {"type": "thinking", "thinking": f"I look at note {turn}.", "signature": "EqQB" + "x" * 64}
        read = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"file_path": f"/note-{turn}"}}
        told: Json = {"type": "tool_result", "tool_use_id": read["id"], "content": self._result(turn)}
        if is_question(turn + 1):
            self._add([thought, *(came or [_block("Done.")])], _question(turn + 1))
        else:
            self._add([thought, *came, read], [told, *([_block("Go on.")] if turn % 4 == 3 else [])])
        usage = next(event["message"]["usage"] for event in events if event["type"] == "message_start")
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]

    def _result(self, turn: int) -> str | list[Json]:
        """As Claude Code's tools answer: a text, blocks of text, or a document."""
        return [
            _told(turn),
            [_block(_told(turn))],
            [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": _told(turn)}}],
        ][turn % 3]

    def _add(self, said: list[Json], asked: str | list[Json]) -> None:
        self._messages += [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]


def _item(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _block(text: str) -> Json:
    return {"type": "text", "text": text}
