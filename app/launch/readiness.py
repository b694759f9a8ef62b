"""Asks the server over HTTP whether it serves: healthy, answering a chat; and which parts are not well."""

from __future__ import annotations

from typing import Any

import httpx

from app.launch.plan import LaunchPlan

_ANSWER_S = 60.0
CHATS_IN_A_ROW = 4
"""Answered before the server counts as ready: the HAProxy that answered the first may be replaced."""


class Readiness:
    """One HTTP client for all the asking. `close` it."""

    def __init__(self, plan: LaunchPlan) -> None:
        key = plan.settings.http.plain_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Where keys are known by their digests only, being asked for one shows that the server serves.
        self._good = {httpx.codes.OK} if key or not plan.settings.http.tenants else {httpx.codes.UNAUTHORIZED}
        # Each question has a connection of its own, as a newcomer's: one that is kept leads to a HAProxy that another
        # has replaced. trust_env=False: a proxy in the environment is not for this machine's own address.
        self._client = httpx.Client(
            base_url=plan.address,
            headers=headers,
            timeout=_ANSWER_S,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._model = plan.settings.model_name
        self._refusal = ""
        self._answered = 0

    def is_healthy(self) -> bool:
        """Whether requests are served by all replicas. What the cache is missing, such as Redis, is not waited for."""
        health = self._health()
        return health is not None and health.get("replicas", {}).get("state", "ok") == "ok"

    def gives_a_token(self) -> bool:
        """Whether a chat is answered, with one token, as it was at the looks before. To be asked until it is so.

        The prompt is short, and leaves nothing in the shared tiers.

        A model whose chats are refused, such as a hub's without a template, is asked to complete a prompt; `ailments`
        has the reason then.
        """
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        status, self._refusal = self._first_token("/v1/chat/completions", chat)
        if status in (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND):
            status, _ = self._first_token("/v1/completions", {"prompt": "Hello"})
        self._answered = self._answered + 1 if status in self._good else 0
        return self._answered >= CHATS_IN_A_ROW

    def _first_token(self, path: str, prompt: dict[str, Any]) -> tuple[int | None, str]:
        """The status of an answer, None without one; and what was said in place of it."""
        try:
            response = self._client.post(path, json={"model": self._model, "max_tokens": 1, **prompt})
        except httpx.HTTPError:
            return None, ""
        if response.status_code in self._good:
            return response.status_code, ""
        try:
            said = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = f"HTTP {response.status_code}"
        return response.status_code, f"chats are refused: {said}"

    def ailments(self) -> list[str] | None:
        """`part: what is wrong with it` for each part that is not well; None when the server does not say.

        A Redis that is still being indexed is well.
        """
        parts = self._health()
        if parts is None:
            return None
        return [self._refusal] * bool(self._refusal) + [
            f"{name}: {part.get('state')}"
            for name, part in parts.items()
            if part.get("state") != "ok" and not part.get("indexing")
        ]

    def indexing(self) -> bool:
        """Whether what Redis holds cannot be reused yet, and soon can."""
        return any(part.get("indexing") for part in (self._health() or {}).values())

    def requests(self) -> int | None:
        """How many requests are being answered or wait; None when the server does not say."""
        ingress = (self._health(timeout_s=1.0) or {}).get("ingress", {})
        return ingress["ongoing"] + ingress["waiting"] if {"ongoing", "waiting"} <= ingress.keys() else None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _health(self, timeout_s: float = _ANSWER_S) -> dict[str, Any] | None:
        """The parts by name; None when requests are not served."""
        try:
            response = self._client.get("/health", timeout=timeout_s)
            parts = response.json().get("parts", {})
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return parts if response.status_code == httpx.codes.OK and isinstance(parts, dict) else None
