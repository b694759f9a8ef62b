"""A stand-in for a crosskv server, over HTTP, without an engine: what `app.cli.demo` relies on, and ways to break it.

Tokens are words. KV is the set of prefixes of whole blocks: one set per replica, and one each for the CPU tier and
Redis with the kind of each block. Answers come from a table.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from app.cli.demo.documents import GREETING_REPLIES

BLOCK = 8
RIGHT_ANSWERS = {
    "Where does Anna live?": "Anna lives in Oslo.",
    "Where is the red ball?": "The red ball is with Nils in Lisbon.",
}

Prefix = tuple[int, ...]


@dataclass
class FakeServer:
    """What the server holds, and, in the second half, what is wrong with it."""

    url: str = ""
    words: dict[str, int] = field(default_factory=dict)
    devices: dict[int, set[Prefix]] = field(default_factory=lambda: {0: set(), 1: set()})
    cpu: dict[Prefix, str] = field(default_factory=dict)
    redis: dict[Prefix, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)

    model: str = "demo"
    answers: dict[str, str] = field(default_factory=lambda: dict(RIGHT_ANSWERS))
    greeting: str = GREETING_REPLIES[0]
    health: int = 200
    has_ingress: bool = True
    """Where there is none, HAProxy answers."""
    cpu_tier_state: str = "ok"
    redis_state: str | None = "ok"
    """None: /health has no such part."""
    obeys_pins: bool = True
    shows_parts: bool = True
    """In /health: off for who is no administrator."""
    saves: bool = True
    saves_answers: bool = True
    copies: bool = True
    """To Redis, whatever is saved."""
    promotes: bool = True
    clears: tuple[str, ...] = ("device", "cpu")
    """The tiers that a clear empties if it is asked to."""
    breaks_off_at: int | None = None
    """The number of the request whose stream ends in its middle."""
    tamper: Callable[[int, dict[str, Any]], None] = lambda number, usage: None
    """Gets every request's number, from 0, and its usage before it is sent."""

    def tokenize(self, text: str) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for word in text.split()]

    def answer(self, body: dict[str, Any], replica: int) -> tuple[list[int], list[int], dict[str, Any]]:
        """Prompt, answer and usage of a chat request."""
        prompt: list[int] = []
        for message in body["messages"]:
            prompt += self.tokenize(f"<{message['role']}> {message['content']} <end>")
        prompt += self.tokenize("<assistant>")
        question = body["messages"][-1]["content"]
        text = self.greeting if question == "Hello!" else self.answers[question]
        answer = self.tokenize(f"{text} <end>")
        salt = self.tokenize(body["cache_salt"])[0]
        most = len(prompt) - 1
        device = self._leading(self.devices[replica], salt, prompt, most)
        with_cpu = max(device, self._leading(self.cpu, salt, prompt, most))
        reused = max(with_cpu, self._leading(self.redis, salt, prompt, most))
        for end in range(BLOCK, len(prompt) + len(answer), BLOCK):
            block = (salt, *[*prompt, *answer][:end])
            kind = "request" if end <= len(prompt) else "answer"
            self.devices[replica].add(block)
            if block in self.redis and block not in self.cpu:
                if self.promotes:
                    self.cpu[block] = self.redis[block]
            elif self.saves and (kind == "request" or self.saves_answers):
                self.cpu.setdefault(block, kind)
                if self.copies:
                    self.redis.setdefault(block, kind)
        kv = {
            "device": device,
            "cpu": with_cpu - device,
            "redis": reused - with_cpu,
            "recomputed": len(prompt) - reused,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "total_tokens": len(prompt) + len(answer),
            "prompt_tokens_details": {"cached_tokens": reused},
            "kv_cache": {**kv, "replica": str(replica)},
        }
        self.tamper(len(self.requests), usage)
        self.requests.append(body)
        return prompt, answer, usage

    def lookup(self, tokens: list[int], cache_salt: str) -> dict[str, Any]:
        salt = self.tokenize(cache_salt)[0]
        blocks = self._leading(self.cpu, salt, tokens, len(tokens)) // BLOCK
        keys = [(salt, *tokens[: BLOCK * (number + 1)]) for number in range(blocks)]
        segments = [
            {
                "key": str(hash(key)),
                "start": start,
                "num_blocks": 1,
                "end": start + 1,
                "tiers": ["cpu"],
                "kind": self.cpu[key],
            }
            for start, key in enumerate(keys)
        ]
        redis = self._leading(self.redis, salt, tokens, len(tokens)) // BLOCK
        return {"block_size_tokens": BLOCK, "cpu": blocks, "redis": redis, "segments": segments}

    def clear(self, tiers: list[str]) -> None:
        if "device" in tiers and "device" in self.clears:
            for held in self.devices.values():
                held.clear()
        if "cpu" in tiers and "cpu" in self.clears:
            self.cpu.clear()

    @staticmethod
    def _leading(known: Any, salt: int, tokens: list[int], most: int) -> int:
        end = 0
        while end + BLOCK <= most and (salt, *tokens[: end + BLOCK]) in known:
            end += BLOCK
        return end


class Handler(BaseHTTPRequestHandler):
    """HTTP for the `FakeServer` that `serve_fake` sets as `fake`."""

    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small write waits 40 ms for the client to acknowledge the one before

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path == "/health" and not self.fake.has_ingress:
            self._send({"error": {"message": "The server is not ready. Please try again later."}}, 503)
        elif path == "/health":
            running = sorted(self.fake.devices) if self.fake.health == 200 else []
            state = "ok" if running else "2 of 2 missing"
            parts: dict[str, dict[str, Any]] = {
                "replicas": {"state": state, "running": running},
                "cpu_tier": {"state": self.fake.cpu_tier_state},
            }
            if self.fake.redis_state is not None:
                parts["redis"] = {"state": self.fake.redis_state, "indexing": False, "segments": len(self.fake.redis)}
            shown = {"parts": parts} if self.fake.shows_parts else {}
            self._send({"status": "ok", **shown}, self.fake.health)
        elif path == "/v1/models":
            self._send({"data": [{"id": self.fake.model}]})
        else:
            tokens = [int(token) for token in query["tokens"][0].split(",")]
            self._send(self.fake.lookup(tokens, query["cache_salt"][0]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/v1/kv/clear":
            self.fake.clear(body["tiers"])
            self._send({"device": {}})
        elif not self.fake.obeys_pins:
            message = "X-CrossKV-Replica is obeyed of administrators."
            self._send({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}, 400)
        else:
            self._stream(body, int(self.headers["X-CrossKV-Replica"]))

    def _stream(self, body: dict[str, Any], replica: int) -> None:
        number = len(self.fake.requests)
        prompt, answer, usage = self.fake.answer(body, replica)
        spelled = {token: word for word, token in self.fake.words.items()}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": self.fake.model}
        self._event({**head, "choices": [_choice("", [])], "prompt_token_ids": prompt})
        for token in answer:
            if number == self.fake.breaks_off_at:
                self.close_connection = True
                return
            text = "" if spelled[token] == "<end>" else f" {spelled[token]}"
            self._event({**head, "choices": [_choice(text, [token])]})
        self._event({**head, "choices": [], "usage": usage})
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: Any) -> None:
        event = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def _send(self, data: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that are gone: a test reads what the demo writes on stderr."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _choice(text: str, tokens: list[int]) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "token_ids": tokens, "finish_reason": None}


@contextlib.contextmanager
def serve_fake() -> Iterator[FakeServer]:
    """Serve a `FakeServer` on a free port, on threads of its own."""
    fake = FakeServer()
    server = QuietServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"fake": fake}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
