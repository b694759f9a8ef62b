"""Where the HTTP server listens, asked of Serve; and that an open server is not reached by accident.

Leans on Ray: the controller actor's `get_http_config`. `tests/app/gate/test_bound_host.py` holds it. `serve run`
and `serve deploy` take the host from a place that the settings do not see (`http_options`), so the running Serve is
asked. The launcher imports this module and needs no Ray itself: the process that asks Serve has it.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

from configs.settings import Settings, SettingsError

ANSWER_S = 30.0


def require_guarded(settings: Settings, host: str | None) -> None:
    """Raise SettingsError for a server that the whole network may use without a key, unless that is wanted."""
    if settings.http.tenants or settings.http.insecure or is_loopback(host):
        return
    raise SettingsError(
        f"http.api_keys: there are no keys, and the server listens on {host or 'every address'}, where other machines "
        f"reach it; set http.api_keys (or CROSSKV_API_KEYS), http_options.host to 127.0.0.1, or http.insecure to true."
    )


def is_loopback(host: str | None) -> bool:
    """Whether only this machine can reach what is bound to, or sent from, this host or address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address((host or "").strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def serve_host() -> str | None:
    """The host that Serve's proxies are bound to; None: none is given. Raises what Ray raises, and TimeoutError."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    config: Any = await asyncio.wait_for(controller.get_http_config.remote(), ANSWER_S)
    return None if config.host is None else str(config.host)
