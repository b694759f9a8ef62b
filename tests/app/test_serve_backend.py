"""Handle calls made within one HTTP request must not be taken for each other by Serve's router."""

from __future__ import annotations

from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context

from app.serve_backend import outside_http_request


def test_a_call_outside_the_http_request_does_not_carry_its_internal_id() -> None:
    token = _serve_request_context.set(_RequestContext(_internal_request_id="of-the-http-request"))
    try:
        inside = _get_serve_request_context()._internal_request_id
        outside = outside_http_request(lambda: _get_serve_request_context()._internal_request_id)
    finally:
        _serve_request_context.reset(token)

    assert inside == "of-the-http-request"
    assert outside == ""
