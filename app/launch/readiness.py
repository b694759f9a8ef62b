"""Asks the server over HTTP whether it serves: healthy, able to produce a token; and which parts are not well."""

from __future__ import annotations

from typing import Any

import httpx

from app.launch.plan import LaunchPlan

_ANSWER_S = 60.0


class Readiness:
    """One HTTP client for all the asking. `close` it."""

    def __init__(self, plan: LaunchPlan) -> None:
        key = plan.settings.http.plain_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Where keys are known by their digests only, being asked for one shows that the server serves.
        self._good = {httpx.codes.OK} if key or not plan.settings.http.tenants else {httpx.codes.UNAUTHORIZED}
        # trust_env=False: a proxy in the environment is not for this machine's own address.
        self._client = httpx.Client(base_url=plan.address, headers=headers, timeout=_ANSWER_S, trust_env=False)
        self._model = plan.settings.model_name

    def is_healthy(self) -> bool:
        """Whether requests are served by all replicas. What the cache is missing, such as Redis, is not waited for."""
        health = self._health()
        return health is not None and health.get("replicas", {}).get("state", "ok") == "ok"

    def gives_a_token(self) -> bool:
        """Whether one token can be generated. The prompt is shorter than a block, so it leaves nothing in any cache."""
        body = {"model": self._model, "prompt": "Hello", "max_tokens": 1}
        try:
            return self._client.post("/v1/completions", json=body).status_code in self._good
        except httpx.HTTPError:
            return False

    def ailments(self) -> list[str] | None:
        """`part: what is wrong with it` for each part that is not well; None when the server does not say.

        A Redis that is still being indexed is well.
        """
        parts = self._health()
        if parts is None:
            return None
        return [
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
