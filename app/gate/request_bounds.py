"""What one request may hold, held against the raw body before vLLM or the control API make objects of it.

* A prompt longer than `max_model_len` tokens, or than the characters that they can stand for, could not be computed: it
  is neither tokenized nor hashed.
* Validating a list holds up all streams, so a body holds as many values as two prompts, and 100,000.
* Messages, prompts, tools, biases, constraints cost work that grows with them, in a template or at every step.
* Media are neither fetched nor decoded: nothing looks at a URL.

Leans on vLLM: `has_non_text_content`, which knows the parts of a message that are media, by type or by field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content

from app.gate.bounded_json import RefusedJsonError, read_json
from app.gate.kv_cache_field import CHUNKS, chunk_texts
from app.gate.request_id import is_request_id

MOST_OTHER_VALUES = 100_000
MOST_PROMPTS = 1024
"""vLLM's own limit on the prompts of one completion request."""
MOST_MESSAGES = 4096
_LONGEST_LISTS = {
    "messages": MOST_MESSAGES,
    "input": MOST_MESSAGES,
    "system": MOST_MESSAGES,
    "tools": 1024,
    "documents": 1024,
    "stop_token_ids": 1024,
    "logit_bias": 1024,
    "bad_words": 128,
    "stop": 128,
    "stop_sequences": 128,
    "metadata": 128,
}
_LARGEST_BYTES = {
    "response_format": 64 * 1024,
    "structured_outputs": 64 * 1024,
    "output_config": 64 * 1024,
    "text": 64 * 1024,
    "tool_choice": 64 * 1024,
    "metadata": 64 * 1024,
    "chat_template_kwargs": 64 * 1024,
    "vllm_xargs": 16 * 1024,
    "tools": 2 * 1024**2,
}
_MOST_CHARACTERS = {"bad_words": 8192, "stop": 8192, "stop_sequences": 8192}
"""Of the entries of a list together, or of a text in its place. The first are tokenized on the event loop, for every
prompt; the others are looked for at every step."""
_CONVERSATIONS = ("messages", "input", "system", "instructions")
"""Of chats, Responses and Anthropic's Messages: what a prompt is rendered from."""
_TEXT_BLOCKS = frozenset(
    {
        "tool_use", "tool_result", "redacted_thinking", "tool_addition", "tool_removal",  # Anthropic's
        "reasoning_text", "summary_text",  # of Responses
    }
)  # fmt: skip
"""Parts of messages that are text, in addition to those that vLLM's function knows."""
_LONGEST_TEXTS = {"model": 1024, "user": 1024, "session_id": 1024, "request_id": 256, "cache_salt": 128}


class RequestBounds:
    """The bounds of one model's server. Stateless; `read` takes up to 0.1 s for a body of 10 MiB."""

    def __init__(self, max_model_len: int, max_chars_per_token: int) -> None:
        self.most_tokens = max_model_len
        self.most_characters = max_model_len * max_chars_per_token

    def read(self, body: bytes, reading: Callable[[dict[str, Any]], None] | None = None) -> Any:
        """A body's JSON. Raises VLLMValidationError (400), in words, for what is none or is beyond a bound.

        `reading` changes it in place once its lists are known to be short, before its texts and parts are looked at; it
        raises the same.
        """
        value = self.read_text(body)
        if isinstance(value, dict):
            self._check_sizes(value)
            if reading is not None:
                reading(value)
            self._check_texts(value, len(body))
        return value

    def check(self, request: Mapping[str, Any], size: int) -> None:
        """Refuse what is beyond a bound in a request that took `size` bytes; raises as `read`."""
        self._check_sizes(request)
        self._check_texts(request, size)

    def _check_sizes(self, request: Mapping[str, Any]) -> None:
        _check_lengths(request)
        for name, most in _LARGEST_BYTES.items():
            if isinstance(request.get(name), list | dict) and len(json.dumps(request[name])) > most:
                raise VLLMValidationError(f"`{name}` is larger than {most} bytes.", parameter=name)

    def _check_texts(self, request: Mapping[str, Any], size: int) -> None:
        prompt = request.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            self._check_length("prompt", *prompt)
        else:
            self._check_length("prompt", prompt)
        for name in ("text", "tokens"):
            self._check_length(name, request.get(name))
        for param in _CONVERSATIONS:
            value = request.get(param)
            if _holds_media([{"content": value}] if param == "system" else value):  # before anything is looked at
                raise VLLMValidationError(
                    "This server takes text only: images, audio and video are never fetched or decoded.",
                    parameter=param,
                )
        if size > self.most_characters:
            texts = [(param, request.get(param)) for param in _CONVERSATIONS]
            for param, value in (*texts, (CHUNKS, chunk_texts(request))):
                if _characters(value) > self.most_characters:
                    raise self._too_long(param)

    def read_text(self, text: bytes, param: str | None = None) -> Any:
        """Any JSON within the bounds on nesting and on the number of values. Raises as `read`."""
        try:
            return read_json(text, 2 * self.most_tokens + MOST_OTHER_VALUES)
        except RefusedJsonError as error:
            raise VLLMValidationError(str(error), parameter=param) from None

    def _check_length(self, param: str, *prompts: Any) -> None:
        if len(prompts) > MOST_PROMPTS:
            raise VLLMValidationError(f"`{param}` holds more than {MOST_PROMPTS} prompts.", parameter=param)
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self.most_characters:
                raise self._too_long(param)
            if isinstance(prompt, list) and len(prompt) > self.most_tokens:
                raise self._too_long(param)

    def _too_long(self, param: str) -> VLLMValidationError:
        return VLLMValidationError(
            f"`{param}` is longer than the model's context, which is {self.most_tokens} tokens "
            f"(at most {self.most_characters} characters).",
            parameter=param,
        )


def _check_lengths(request: Mapping[str, Any]) -> None:
    for name, most in _LONGEST_LISTS.items():
        if isinstance(request.get(name), list | dict) and len(request[name]) > most:
            raise VLLMValidationError(f"`{name}` holds more than {most} entries.", parameter=name)
    for name, most in _MOST_CHARACTERS.items():
        if _characters(request.get(name)) > most:
            raise VLLMValidationError(f"`{name}` holds more than {most} characters.", parameter=name)
    for name, most in _LONGEST_TEXTS.items():
        if isinstance(request.get(name), str) and len(request[name]) > most:
            raise VLLMValidationError(f"`{name}` is longer than {most} characters.", parameter=name)
    request_id = request.get("request_id")
    if isinstance(request_id, str) and not is_request_id(request_id):  # logs and answers repeat it
        raise VLLMValidationError("`request_id` must be printable ASCII characters, no spaces.", parameter="request_id")


def _holds_media(messages: Any) -> bool:
    """Whether messages, or items of Responses, hold more than text, in what a tool returned too."""
    if not isinstance(messages, list):
        return False
    contents = [one.get(name) for one in messages if isinstance(one, dict) for name in ("content", "output")]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    for part in parts:  # which grows: what a tool returned may hold what another one did
        if isinstance(part, dict) and part.get("type") == "tool_result" and isinstance(part.get("content"), list):
            parts += part["content"]
    known = [{**part, "type": "text"} if _is_text_block(part) else part for part in parts]
    return has_non_text_content([{"content": known}])


def _is_text_block(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _TEXT_BLOCKS


def _characters(value: Any) -> int:
    return sum(map(len, _texts(value)))


def _texts(value: Any) -> Iterator[str]:
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            open_values.extend(one)
        elif isinstance(one, dict):
            open_values.extend(one)
            open_values.extend(one.values())
