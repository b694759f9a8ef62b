"""An open server is not reached from other machines by accident; and how Serve is asked where it listens."""

from __future__ import annotations

import inspect

import pytest
from ray.serve._private import controller
from ray.serve.config import HTTPOptions

from app.bound_host import require_guarded
from configs.settings import SettingsError, load_settings


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
