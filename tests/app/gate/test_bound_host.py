"""An open server is not reached from other machines by accident; and how Serve is asked where it listens."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import httpx
import pytest
from ray import cloudpickle, serve
from ray.serve._private import controller
from ray.serve.config import HTTPOptions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.gate.auth import from_this_machine
from app.gate.bound_host import require_guarded, serve_host
from configs.settings import SettingsError, load_settings
from load_tests.harness.patience import patience

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", None, "10.0.0.1", "example.org"])
def test_a_server_without_keys_is_not_bound_beyond_loopback_unless_that_is_wanted(host: str | None):
    with pytest.raises(SettingsError, match=r"http\.api_keys: there are no keys.*CROSSKV_API_KEYS.*http\.insecure"):
        require_guarded(load_settings({}), host)
    require_guarded(load_settings({"http": {"insecure": True}}), host)
    require_guarded(load_settings({"http": {"api_keys": {"key": "tenant"}}}), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_on_loopback_a_server_needs_no_keys(host: str):
    require_guarded(load_settings({}), host)


def test_serves_controller_tells_its_http_options():
    """Contract with ray 2.60.0."""
    assert inspect.signature(controller.ServeController.get_http_config).return_annotation in (
        HTTPOptions,
        "HTTPOptions",
    )
    assert "host" in HTTPOptions.model_fields


@serve.ingress()
class Doorkeeper:
    """Answers where Serve listens, and whether who asks is on this machine."""

    async def __serve_build_asgi_app__(self) -> Starlette:
        host = await serve_host()

        async def who(request: Request) -> JSONResponse:
            return JSONResponse({"host": host, "local": from_this_machine(request.scope, request.headers)})

        return Starlette(routes=[Route("/who", who)])


@pytest.mark.server
@pytest.mark.long("tests/app/control/test_tenants.py::test_who_works_on_this_machine")
@pytest.mark.long("tests/end_to_end/test_listening.py")
def test_an_ingress_behind_serves_proxy_knows_the_host_and_who_calls(serve_port: int):
    try:
        doorkeeper: Any = serve.deployment(Doorkeeper, ray_actor_options={"num_cpus": 0})
        serve.run(doorkeeper.bind(), name="door", route_prefix="/")
        url = f"http://127.0.0.1:{serve_port}/who"
        assert httpx.get(url, timeout=patience(60)).json() == {"host": "127.0.0.1", "local": True}
        for headers in ({"x-forwarded-for": "127.0.0.1"}, {"host": "rebound.example"}, {"x-real-ip": "203.0.113.7"}):
            assert httpx.get(url, headers=headers, timeout=patience(60)).json() == {"host": "127.0.0.1", "local": False}
    finally:
        serve.delete("door")
