"""Asks the server over HTTP whether it serves: healthy, and able to produce a token."""

from __future__ import annotations

import httpx

from app.launch.plan import LaunchPlan


class Readiness:
    """One HTTP client for all the asking. `close` it."""

    def __init__(self, plan: LaunchPlan) -> None:
        keys = plan.settings.http.api_keys
        headers = {"Authorization": f"Bearer {next(iter(keys))}"} if keys else {}
        # trust_env=False: a proxy in the environment is not for this machine's own address.
        self._client = httpx.Client(base_url=plan.address, headers=headers, timeout=60.0, trust_env=False)
        self._model = plan.settings.model_name

    def is_healthy(self) -> bool:
        """Whether GET /health answers 200."""
        return self._answers("GET", "/health")

    def gives_a_token(self) -> bool:
        """Whether one token can be generated. The prompt is shorter than a block, so it leaves nothing in any cache."""
        return self._answers("POST", "/v1/completions", {"model": self._model, "prompt": "Hello", "max_tokens": 1})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _answers(self, method: str, path: str, body: dict[str, object] | None = None) -> bool:
        try:
            return self._client.request(method, path, json=body).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False
