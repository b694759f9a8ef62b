"""The demo's HTTP calls: chat through OpenAI's own client, the rest of the server through httpx."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from app.demo.known_kv import TokensBySource

PIN_HEADER = "X-CrossKV-Replica"
NO_KEY = "none"  # OpenAI's client wants a key even where the server does not
ANSWER_S = 120.0
CONTROL_S = 15.0
CONNECT_S = 5.0
POLL_S = 0.05

Message = dict[str, str]


class DemoError(Exception):
    """The demo cannot go on; `str()` of it is one sentence for a person. `exit_code` is the command's."""

    exit_code = 1


class UnusableServerError(DemoError):
    """There is no server, or it is set up so that nothing can be shown: nothing is wrong with its answers."""

    exit_code = 2


@dataclass(frozen=True)
class DemoTurn:
    """One request and its answer, in words and in tokens; `ttft_s` from sending to the first piece of text."""

    replica: str
    ttft_s: float
    tokens: TokensBySource
    cached_tokens: int
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str
    reason: str = ""
    """Why it was not loaded, or where most of it came from, as the usage says."""

    @property
    def computed(self) -> list[int]:
        """The tokens whose KV the replica has now: the model has not read the answer's last one yet."""
        return [*self.prompt_ids, *self.answer_ids[:-1]]


class DemoServer:
    """A running crosskv server. All that is sent through one object shares one `cache_salt`, so KV of its own."""

    def __init__(self, url: str, cache_salt: str, model: str | None = None, api_key: str | None = None) -> None:
        """Find the server; raises UnusableServerError when it is not there or not ready."""
        self.url = url
        self._salt = cache_salt
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No proxies from the environment: the server is usually on this machine.
        timeout = httpx.Timeout(CONTROL_S, connect=CONNECT_S)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=api_key or NO_KEY,
            timeout=ANSWER_S,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        self.ailing: list[str] = []
        """Parts that are not well, though requests are served."""
        self.replicas = self._find_replicas()
        self.model = model or self._first_model()
        self.block_size_tokens = int(self.lookup([0])["block_size_tokens"])

    def ask(self, messages: Sequence[Message], replica: int, **sampling: Any) -> DemoTurn:
        """Send a chat to one replica, greedy if `sampling` does not say otherwise, and read the stream."""
        extra = {"cache_salt": self._salt, "return_token_ids": True, **sampling.pop("extra_body", {})}
        text, usage, first = "", None, 0.0
        prompt_ids: list[int] = []
        answer_ids: list[int] = []
        create: Any = self._openai.chat.completions.create  # its overloads know neither `sampling` nor our usage
        started = time.monotonic()
        with _openai_errors(self.url):
            stream = create(
                model=self.model,
                messages=list(messages),
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={PIN_HEADER: str(replica)},
                extra_body=extra,
                **{"temperature": 0.0, **sampling},
            )
            for chunk in stream:
                usage = chunk.usage or usage
                prompt_ids = getattr(chunk, "prompt_token_ids", None) or prompt_ids
                for choice in chunk.choices:
                    answer_ids += getattr(choice, "token_ids", None) or []
                    if choice.delta.content:
                        first = first or time.monotonic()
                        text += choice.delta.content
        kv = getattr(usage, "kv_cache", None)
        if usage is None or kv is None or not prompt_ids:
            raise UnusableServerError(f"The server at {self.url} does not say where KV came from: is it crosskv?")
        details = usage.prompt_tokens_details
        return DemoTurn(
            replica=str(kv["replica"]),
            ttft_s=(first or time.monotonic()) - started,
            tokens=TokensBySource(kv["device"], kv["cpu"], kv["redis"], kv["recomputed"]),
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            prompt_ids=prompt_ids,
            answer_ids=answer_ids,
            text=text,
            reason=str(kv.get("reason") or ""),
        )

    def lookup(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Where the KV of these tokens lies now: leading blocks by tier, and the segments."""
        listed = ",".join(map(str, tokens))
        return self._get("/api/v1/kv/lookup", params={"tokens": listed, "cache_salt": self._salt})

    def clear(self, *tiers: str) -> None:
        """Empty these tiers (`device`, `cpu`) on all replicas and nodes."""
        with _http_errors(self.url):
            response = self._http.post("/api/v1/kv/clear", json={"tiers": tiers})
        _refuse_errors(response)

    def wait_until_in(self, tier: str, tokens: Sequence[int], deadline_s: float) -> bool:
        """Wait until a shared tier has every whole block of `tokens`; False when it has not in time."""
        wanted = len(tokens) // self.block_size_tokens
        return _wait_until(lambda: self.lookup(tokens)[tier] >= wanted, deadline_s)

    def wait_until_none_in(self, tier: str, tokens: Sequence[int], deadline_s: float) -> bool:
        """Wait until a shared tier has no block that `tokens` begin with; False when it has one still."""
        return _wait_until(lambda: self.lookup(tokens)[tier] == 0, deadline_s)

    def parts(self) -> dict[str, Any] | None:
        """The server's parts by name, as /health says; None while it serves no requests. Raises nothing."""
        try:
            serves, parts = self._read_health()
        except DemoError:
            return None
        return parts if serves else None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._openai.close()

    def _find_replicas(self) -> list[int]:
        serves, parts = self._read_health()
        self.ailing = [f"{name}: {part['state']}" for name, part in parts.items() if part.get("state") != "ok"]
        running = [int(rank) for rank in parts.get("replicas", {}).get("running", [])]
        if not serves or not running:
            why = f" ({', '.join(self.ailing)})" if self.ailing else ""
            raise UnusableServerError(f"The server at {self.url} is not ready{why}; try again later.")
        return running

    def _read_health(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are served, and the parts by name."""
        with _http_errors(self.url):
            response = self._http.get("/health")
        try:
            answer = response.json()
            if "error" in answer and response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                return False, {}  # HAProxy's, while there is no ingress
            if "status" in answer and "parts" not in answer:
                raise UnusableServerError(
                    f"The server at {self.url} shows its parts to administrators only: give --api-key a key with "
                    "`admin: true`."
                )
            return response.is_success, dict(answer["parts"])
        except (ValueError, KeyError, TypeError):
            raise UnusableServerError(
                f"What answers at {self.url} is not crosskv: give --port of one that is."
            ) from None

    def _first_model(self) -> str:
        return str(self._get("/v1/models")["data"][0]["id"])

    def _get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        with _http_errors(self.url):
            response = self._http.get(path, params=params)
        _refuse_errors(response)
        found: dict[str, Any] = response.json()
        return found


def _wait_until(condition: Callable[[], bool], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


@contextmanager
def _http_errors(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError:
        raise UnusableServerError(
            f"No server answers at {url}: start one with `make serve`, or give the --port that it listens on."
        ) from None
    except httpx.HTTPError as error:
        raise DemoError(f"The server at {url} broke off: {str(error).rstrip('.') or type(error).__name__}.") from None


def _refuse_errors(response: httpx.Response) -> None:
    if response.is_error:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:200] or response.reason_phrase
        raise _refusal(response.status_code, message)


def _refusal(status: int, message: str) -> DemoError:
    """A 4xx is about how the server is set up or the demo was called; a 5xx is the server's own failure."""
    kind = UnusableServerError if status < 500 else DemoError
    return kind(f"The server refused with {status}: {message}")


@contextmanager
def _openai_errors(url: str) -> Iterator[None]:
    try:
        yield
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        raise _refusal(error.status_code, str(body.get("message") or error.message)) from None
    except (openai.APIError, httpx.HTTPError) as error:
        raise DemoError(f"The server at {url} broke off an answer: {str(error).rstrip('.')}.") from None
