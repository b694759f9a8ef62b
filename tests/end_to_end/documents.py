"""Documents as chunks of a prompt, in any order; what a server answers to it, and what it has stored of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from app.cli.demo.documents import FACTS
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

_PEOPLE = list(FACTS)
TEXTS = [
    " ".join(sentence for _ in range(4) for name in _PEOPLE[at : at + 5] for sentence in FACTS[name])
    for at in range(0, 30, 5)
]
"""Six documents of some 450 tokens, each about five people."""
QUESTIONS = {
    f"Where does {name} live?": next(fact for fact in FACTS[name] if " lives in " in fact) for name in _PEOPLE[:30:5]
}
"""One about each document, and its answer."""
BLENDED = {"kv_cache": {"fidelity": "blended"}}


def body(order: Sequence[int], question: str, salt: str, **more: Any) -> dict[str, Any]:
    """A chat whose documents stand in this order."""
    return {
        "model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0,
        "documents": [{"text": TEXTS[number]} for number in order], "cache_salt": salt, **more,
    }  # fmt: skip


def ask(server: RunningServer, asked: dict[str, Any], path: str = "chat/completions") -> tuple[str, dict[str, Any]]:
    """Replica 0's answer and `usage.kv_cache`, when everything that the prompt caused is done."""
    response = httpx.post(
        f"{server.url}/v1/{path}", json=asked, headers={"X-CrossKV-Replica": "0"}, timeout=patience(60)
    )
    answer = response.raise_for_status().json()
    server.wait_until_idle()
    (choice,) = answer["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"]).strip(), answer["usage"][
        "kv_cache"
    ]


def stored_chunks(server: RunningServer, asked: dict[str, Any]) -> list[int]:
    """Of each chunk of a prompt, how many of its tokens a CPU tier has."""
    params = {
        "messages": json.dumps(asked["messages"]),
        "chat": json.dumps({"documents": asked["documents"]}),
        "cache_salt": asked["cache_salt"],
        "fidelity": "blended",
    }
    found = httpx.get(f"{server.url}/api/v1/kv/lookup", params=params, timeout=patience(60)).raise_for_status().json()
    return [chunk["tokens_by_tier"]["cpu"] for chunk in found["chunks"]]


def adds_up(usage: dict[str, Any]) -> bool:
    return 0 <= usage["blended"] <= usage["cpu"] + usage["redis"]
