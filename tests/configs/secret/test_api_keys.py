"""Keys: the places they come from, their forms, and that no sentence shows one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from configs.secret.api_keys import KEYS_VARIABLE
from configs.settings import SettingsError, load_settings


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def load(**http: Any) -> Any:
    return load_settings({"http": http}).http


def said(**http: Any) -> str:
    with pytest.raises(SettingsError) as error:
        load(**http)
    sentence = str(error.value)
    assert "hunter2" not in sentence
    assert "\n" not in sentence
    return sentence


def test_keys_of_the_settings_the_environment_and_a_file_are_one_mapping(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "keys.yaml"
    file.write_text(f"http: {{api_keys: {{'{digest('key-c')}': carol, key-o: {{tenant: ops, admin: true}}}}}}\n")
    file.chmod(0o600)
    monkeypatch.setenv(KEYS_VARIABLE, json.dumps({"key-b": "bob", "key-a": {"tenant": "alice"}}))
    http = load_settings({"http": {"api_keys": {"key-a": "alice"}}, "secrets_file": str(file)}).http
    assert http.tenants == ("alice", "bob", "carol", "ops")
    assert set(http.keys) == {digest(key) for key in ("key-a", "key-b", "key-c", "key-o")}
    assert http.keys[digest("key-o")].admin
    assert not http.keys[digest("key-a")].admin
    assert http.plain_key == "key-o"
    assert "key-o" not in repr(http)


def test_a_digest_stands_for_its_key_and_a_key_for_one_tenant(monkeypatch: pytest.MonkeyPatch):
    assert load(api_keys={digest("key").upper().replace("SHA256", "sha256"): "alice"}).keys.keys() == {digest("key")}
    assert "stands for two" in said(api_keys={"hunter2": "alice", digest("hunter2"): "bob"})
    monkeypatch.setenv(KEYS_VARIABLE, "hunter2: bob")
    assert said(api_keys={"hunter2": "alice"}).startswith(f"{KEYS_VARIABLE}: a key means something else")


@pytest.mark.parametrize(
    "http",
    [
        {"api_keys": {"sha256:hunter2": "alice"}},
        {"api_keys": {"hunter2": ""}},
        {"api_keys": {"hunter2": " "}},
        {"api_keys": {" ": "alice"}},
        {"api_keys": {"hunter2": "a\nb"}},
        {"api_keys": {"hunter2": "a" * 65}},
        {"api_keys": {"hunter2": {"admin": True}}},
        {"api_keys": {"hunter2": {"tenant": "a", "root": True}}},
        {"api_keys": {"hunter2": {"tenant": "a", "admin": "hunter2"}}},
        {"api_keys": ["hunter2"]},
        {"metrics_key": "sha256:hunter2"},
        {"metrics_key": ""},
        {"metrics_key": ["hunter2"]},
        {"api_keys": {"hunter2": "alice"}, "metrics_key": "hunter2"},
    ],
    ids=str,
)
def test_what_is_no_key_is_refused_without_being_shown(http: dict[str, Any]):
    assert said(**http).startswith("http.")


@pytest.mark.parametrize("text", ["- hunter2", "hunter2", "{hunter2: [", "5: alice", "hunter2: 5"])
def test_what_the_environment_holds_is_a_mapping_or_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv(KEYS_VARIABLE, text)
    assert KEYS_VARIABLE in said() or "http.api_keys" in said()


def test_every_tenant_has_room_or_the_start_says_so():
    keys = {f"key-{number}": f"tenant-{number}" for number in range(5)}
    assert "use at least 5" in said(api_keys=keys, max_ongoing_requests=4)


def test_a_keys_priority_is_bounded_and_may_not_differ_between_places(monkeypatch: pytest.MonkeyPatch):
    http = load(api_keys={"key-a": {"tenant": "alice", "priority": 10}, "key-b": "bob"})
    assert [http.keys[digest(key)].priority for key in ("key-a", "key-b")] == [10, 0]
    for priority in (10**7, -(10**7), 0.5, "first", True, None):
        assert "from -1000000 to 1000000" in said(api_keys={"hunter2": {"tenant": "alice", "priority": priority}})
    monkeypatch.setenv(KEYS_VARIABLE, json.dumps({"hunter2": {"tenant": "alice", "priority": 5}}))
    assert "something else" in said(api_keys={"hunter2": "alice"})
