"""Error messages are cut before vLLM looks for paths in them.

vLLM's messages repeat what a client has sent. `sanitize_message` then looks for paths by a regular expression that
backtracks: a text of 16 KB such as `/a/a/a…` takes it a minute, on the event loop.

Leans on vLLM: `sanitize_message`, which `MODULES` import by its name. `tests/app/loop/test_error_messages.py` holds
that no other module of the ingress has it.
"""

from __future__ import annotations

from vllm.entrypoints.anthropic import serving as anthropic_serving
from vllm.entrypoints.serve.exception_handling import error_response
from vllm.entrypoints.serve.exception_handling.handlers import http, validation
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

MOST_CHARACTERS = 360
"""Of a message. The worst one of 1,000 takes vLLM's expression some 20 ms."""
MODULES = (error_response, http, validation, anthropic_serving)


def sanitize_cut(message: str) -> str:
    """vLLM's `sanitize_message` of the message's beginning, which says how much is left out."""
    left_out = len(message) - MOST_CHARACTERS
    if left_out <= 0:
        return sanitize_message(message)
    return f"{sanitize_message(message[:MOST_CHARACTERS])} … ({left_out} more characters)"


def cut_error_messages() -> None:
    """Let vLLM's handlers and serving classes sanitize by `sanitize_cut`, in this process."""
    for module in MODULES:
        module.sanitize_message = sanitize_cut  # type: ignore[attr-defined]
