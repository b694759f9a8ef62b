"""`crosskv` in front of a real server: what it shows is what the server does."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from app.cli.__main__ import app
from configs import machine
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

TEXT = " ".join(f"Anna lives in Paris. Ben is a baker. Line {number}." for number in range(30))


def crosskv(server: RunningServer, *arguments: str) -> Result:
    result = CliRunner().invoke(app, [*arguments, "--url", server.url], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def said(server: RunningServer, *arguments: str) -> dict[str, Any]:
    """What a command answers machines."""
    result = crosskv(server, *arguments, "--json")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def known(server: RunningServer) -> list[str]:
    """Have a replica compute `TEXT` and its KV stored; the arguments that name it."""
    salt = f"command-line-{uuid.uuid4()}"
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 4, "cache_salt": salt}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=patience(60)).raise_for_status()
    prompt = [TEXT, "--cache-salt", salt]
    server.wait_until(lambda: said(server, "lookup", *prompt)["tokens_by_tier"]["cpu"] >= 256, "it is in the CPU tier")
    server.wait_until_idle()
    return prompt


def test_a_prompt_is_looked_up_pinned_and_cleared(server: RunningServer) -> None:
    prompt = known(server)
    shown = crosskv(server, "lookup", *prompt)
    assert shown.exit_code == 0
    assert "device of replica" in shown.output

    assert crosskv(server, "pin", *prompt, "--ttl-s", "60").exit_code == 0
    assert all(segment["pinned"] for segment in said(server, "lookup", *prompt)["segments"])
    assert crosskv(server, "unpin", *prompt).exit_code == 0
    assert not any(segment["pinned"] for segment in said(server, "lookup", *prompt)["segments"])

    assert crosskv(server, "clear", "device", "cpu", "redis", "--yes").exit_code == 0
    unknown = crosskv(server, "lookup", *prompt)
    assert unknown.exit_code == 1
    refused = crosskv(server, "pin", TEXT, "--cache-salt", f"never sent {uuid.uuid4()}")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("The server refused: ")


def test_status_and_top_show_a_server_that_is_well(server: RunningServer) -> None:
    status = crosskv(server, "status")
    assert status.exit_code == 0, status.output
    assert "is ok" in status.output
    assert {"cpu", "redis"} <= {place["tier"] for place in said(server, "status")["stats"]["locations"]}
    top = crosskv(server, "top", "--once")
    assert top.exit_code == 0
    assert "prompts ongoing" in top.output


def test_the_trie_has_what_was_stored(server: RunningServer) -> None:
    segments = said(server, "lookup", *known(server))["segments"]
    nodes = {node["id"]: node for node in said(server, "trie", "--depth", "8", "--most", "2000")["nodes"]}
    first, second = (nodes[segment["key"]] for segment in segments[:2])
    assert second["parent"] == first["id"]
    shown = crosskv(server, "trie", "--root", first["id"][:12]).output
    assert second["id"][:12] in shown


@pytest.mark.usefixtures("own_machine")
def test_the_doctor_sees_how_the_server_is_set(server: RunningServer) -> None:
    known(server)
    result = crosskv(server, "doctor", "--json")
    found = json.loads(result.stdout)
    names = [one["name"] for one in found["advice"]]
    assert found["notes"] == []
    assert found["seen"]["prompts"] > 0
    assert ("slow-dtype" in names) == (machine.cpu_dtype() == "bfloat16"), "this server computes in float32"
    assert result.exit_code == (1 if names else 0)
