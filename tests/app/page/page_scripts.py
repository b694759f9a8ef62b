"""What the stand-in for a replica says on the page, in scripts of `fake_backend`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fake_backend import Script, say
from vllm.outputs import RequestOutput

from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest

HOSTILE = (
    "<script>window.caught = 1</script> <img src=x onerror='window.caught = 2'>\n\n"
    "**<b onclick=alert(1)>bold</b>** [link](javascript:window.caught=3) [data](data:text/html,x) "
    "[good](https://example.com/a?b=1)\n\n"
    "```html\n<script>window.caught = 4</script>\n```\n\n"
    "| a | <i>b</i> |\n|---|---|\n| 1 | <svg onload=window.caught=5> |\n\n> <iframe src=//evil.example></iframe>\n\n"
    "- one\n  - <style>*{display:none}</style>\n1. two\n"
)
"""Markdown with every way to become more than text."""


def answering(text: str, **kv: Any) -> Script:
    """Say `text` in pieces, and report 2, 4 and 2 tokens of the prompt from the tiers; `kv` adds to that usage."""

    async def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
        for number, piece in enumerate(pieces):
            output = say(request, [10 + number], piece, finished=number == len(pieces) - 1)
            if output.kv_transfer_params:
                counts = {"device": 2, "cpu": 4, "redis": 2, "recomputed": len(request.prompt_token_ids) - 8}
                output.kv_transfer_params[KV_CACHE_USAGE] = {"replica": "0", **counts, **kv}
            yield output

    return script
