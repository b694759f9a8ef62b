"""The HTTP calls of all commands: each has a deadline, and what goes wrong is one sentence (`CommandError`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.cli.failures import CANNOT, NOT_SO, CommandError
from app.cli.options import KEY_VARIABLE, find_key
from app.cli.samples import Samples

CONNECT_S, ANSWER_S, STREAM_S = 3.0, 15.0, 120.0
"""Clearing asks every replica and tier, for which the server itself has ten seconds. A stream's first word may wait for
other prompts."""

_REFUSED: dict[int, str] = {
    httpx.codes.UNAUTHORIZED: f"The server wants an API key, and not this one: set {KEY_VARIABLE}, or give --key-file.",
    httpx.codes.FORBIDDEN: "This key may not do that",
    httpx.codes.TOO_MANY_REQUESTS: "The server has too much to do",
}


class ServerClient:
    """A crosskv server over HTTP. Nothing is asked before the first call; `close` it, or use `with`."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises CommandError for a URL that is none."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise CommandError(f"{url!r} is no URL ({error}); give one such as http://127.0.0.1:8000.") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise CommandError(f"{url!r} is no server's URL; give one such as http://127.0.0.1:8000.")
        # trust_env: a proxy in the environment is not for this machine's own address. Redirects are not followed: the
        # key goes nowhere else.
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """An object that the server answers with. Raises CommandError."""
        return self._object(self._send("GET", path, params=params))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same, of an order."""
        return self._object(self._send("POST", path, json=body))

    def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer, as they come. Raises CommandError, also where it breaks off."""
        order: dict[str, Any] = {"json": body, "headers": headers, "timeout": STREAM_S}
        with self._told_errors(STREAM_S), self._http.stream("POST", path, **order) as response:
            if not response.is_success:
                response.read()
                raise self._refusal(response)
            for text in response.iter_lines():
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    event = json.loads(text.removeprefix("data: "))
                    if "error" in event:
                        break
                    yield event
        raise CommandError(f"The server at {self.url} broke off an answer.")

    def health(self) -> dict[str, Any]:
        """GET /health, which answers 503 with a report as well."""
        response = self._ask("GET", "/health")
        report = self._read(response)
        if not isinstance(report, dict) or "status" not in report:
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                raise CommandError(f"The server at {self.url} is starting or ending: no ingress answers yet.")
            raise self._stranger()
        return report

    def metrics(self) -> Samples:
        """GET /metrics, for administrators and `http.metrics_key`."""
        response = self._send("GET", "/metrics")
        try:
            return Samples.parse(response.text)
        except ValueError:
            raise self._stranger() from None

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        response = self._ask(method, path, **content)
        if response.is_success:
            return response
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> CommandError:
        said = self._said(response)
        status = response.status_code
        if status == httpx.codes.UNAUTHORIZED:
            return CommandError(_REFUSED[status], CANNOT, status)
        if status in _REFUSED:
            return CommandError(f"{_REFUSED[status]}: {said}", CANNOT, status)
        if 400 <= status < 500:
            return CommandError(f"The server refused: {said}", NOT_SO, status)
        return CommandError(f"The server at {self.url} failed with {status}: {said}", CANNOT, status)

    def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        with self._told_errors(ANSWER_S):
            return self._http.request(method, path, **content)

    @contextmanager
    def _told_errors(self, silence_s: float) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise CommandError(
                f"No server answers at {self.url}: start one with `crosskv serve`, or give its --url."
            ) from None
        except httpx.TimeoutException:
            raise CommandError(f"The server at {self.url} does not answer in {silence_s:.0f} s.") from None
        except json.JSONDecodeError:
            raise self._stranger() from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = str(error).rstrip(".") or type(error).__name__
            raise CommandError(f"The server at {self.url} broke off: {what}.") from None

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        answer = self._read(response)
        if not isinstance(answer, dict):
            raise self._stranger()
        return answer

    def _read(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            return None

    def _said(self, response: httpx.Response) -> str:
        """The sentence of an error in OpenAI's shape, else its beginning, else its status in words."""
        answer = self._read(response)
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return str(message or response.text[:200] or f"{response.status_code} {response.reason_phrase}")

    def _stranger(self) -> CommandError:
        return CommandError(f"What answers at {self.url} is not crosskv: give the --url of one that is.")


def connect(url: str, key_file: Path | None) -> ServerClient:
    """The server of the common options. Raises CommandError."""
    return ServerClient(url, find_key(key_file))
