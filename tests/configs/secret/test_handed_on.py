"""What other processes are told: no key, no password, and where the rest can be read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launch.run_folder import SECRETS_FILE, remove_secrets, write_configuration
from configs.secret.api_keys import KEYS_VARIABLE
from configs.secret.handed_on import parted, sealed, shown_secrets
from configs.section import secret_fields
from configs.settings import Settings, SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

SECRET = "hunter2"
PLACES: dict[str, dict[str, Any]] = {
    "a tenant's key": {"http": {"api_keys": {SECRET: "acme"}}},
    "an administrator's key": {"http": {"api_keys": {SECRET: {"tenant": "acme", "admin": True}}}},
    "the key of the metrics": {"http": {"metrics_key": SECRET}},
    "a password of Redis": {"kv": {"redis_url": f"redis://:{SECRET}@10.0.0.1:6379/0"}},
    "one behind TLS, with a user": {"kv": {"redis_url": f"rediss://crosskv:{SECRET}@10.0.0.1:6379/0"}},
    "one among the parameters": {"kv": {"redis_url": f"redis://10.0.0.1:6379/0?password={SECRET}"}},
    "one of a socket": {"kv": {"redis_url": f"unix://:{SECRET}@/run/redis.sock"}},
    "one that is not encoded": {"kv": {"redis_url": f"redis://:a#{SECRET}/b@10.0.0.1:6379/0"}},
    "a collector's password": {"http": {"otlp_endpoint": f"http://crosskv:{SECRET}@collector:4318/v1/traces"}},
    "a hub's token": {"engine": {"extra_args": {"hf_token": SECRET, "max_logprobs": 5}}},
}
EACH = pytest.mark.parametrize("args", PLACES.values(), ids=PLACES)


def private(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    path.chmod(0o600)
    return str(path)


def written(folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """`args:` as Serve reads them of what the launcher writes."""
    config = {"applications": [{"name": "crosskv", "args": args}]}
    path = write_configuration(folder, config, load_settings(args))
    assert path.stat().st_mode & 0o077 == 0
    found: dict[str, Any] = yaml.safe_load(path.read_text())["applications"][0]["args"]
    return found


@EACH
def test_serve_reads_no_secret_and_the_settings_are_the_same(tmp_path: Path, args: dict[str, Any]) -> None:
    told = written(tmp_path, {"replicas": 3, **args})
    assert SECRET not in (tmp_path / "serve_config.yaml").read_text()
    before, after = load_settings(args), load_settings(told)
    assert (after.replicas, after.http.keys, after.kv.redis_url) == (3, before.http.keys, before.kv.redis_url)
    assert after.http.otlp_endpoint == before.http.otlp_endpoint
    assert after.engine.extra_args == before.engine.extra_args
    remove_secrets(tmp_path)
    assert not any(SECRET in file.read_text() for file in tmp_path.iterdir())


@EACH
def test_a_secret_may_stand_in_a_file_of_its_own(tmp_path: Path, args: dict[str, Any]) -> None:
    file = private(tmp_path / "mine.yaml", args)
    given = {"kv": {"redis_url": "embedded", "redis_bytes": "5MiB"}, "secrets_file": file}
    settings = load_settings(given)
    assert SECRET not in repr(settings) + str(shown_secrets(given))
    assert settings.kv.redis_bytes == 5 * 1024**2, "what the file does not say stays"
    assert settings.model_dump(exclude={"secrets_file", "kv"}) == load_settings(args).model_dump(
        exclude={"secrets_file", "kv"}
    )
    assert settings.kv.redis_url == load_settings(args).kv.redis_url
    run = tmp_path / "run"
    run.mkdir()
    told = written(run, given)
    assert told.get("secrets_file") in (None, str(run / SECRETS_FILE))
    assert SECRET not in json.dumps(told)
    assert load_settings(told).http.keys == settings.http.keys


def test_a_secrets_file_of_the_last_start_does_not_stay(tmp_path: Path) -> None:
    assert "secrets_file" in written(tmp_path, {"kv": {"redis_url": "redis://:a@b"}})
    assert "secrets_file" not in written(tmp_path, {"kv": {"redis_url": "embedded"}})
    assert [path.name for path in tmp_path.iterdir()] == ["serve_config.yaml"]


def test_other_processes_get_digests_and_neither_keys_nor_where_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"http": {"api_keys": {"key-f": {"tenant": "frank", "admin": True}}}}))
    file.chmod(0o600)
    monkeypatch.setenv(KEYS_VARIABLE, "key-e: erin")
    keys = {"api_keys": {"key-a": "alice"}, "metrics_key": "key-m"}
    args = {"replicas": 3, "secrets_file": str(file), "http": keys, "kv": {"redis_url": f"redis://:{SECRET}@10.0.0.1"}}
    http = load_settings(args).http
    passed = sealed(args, http.api_keys, http.metrics_key)
    assert not any(key in repr(passed) for key in ("key-a", "key-e", "key-f", "key-m", str(file), SECRET, "10.0.0.1"))
    file.unlink()
    again = load_settings(passed)
    assert (again.http.keys, again.replicas) == (http.keys, 3)
    assert again.kv.redis_url is not None
    assert not again.kv.redis_embedded


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- hunter2", "must hold settings"),
        ("hunter2", "must hold settings"),
        ("{hunter2: [", "must hold settings"),
        ("{secrets_file: hunter2}", "must hold settings"),
        ("{kv: {redis_url: [hunter2]}}", "kv.redis_url"),
        ("{http: {otlp_endpoint: 'ftp://hunter2@b'}}", "http.otlp_endpoint"),
        ("{http: {metrics_key: [hunter2]}}", "http.metrics_key"),
        ("{engine: {extra_args: hunter2}}", "engine.extra_args"),
        (b"\xffhunter2", "no text"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused_without_being_shown(
    tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = tmp_path / "secrets.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=says) as refused:
        load_settings({"secrets_file": str(path)})
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_had_or_that_everybody_reads_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open.yaml"
    open_to_all.write_text("http: {metrics_key: hunter2}")
    open_to_all.chmod(0o644)
    for path, says in ((open_to_all, "chmod 600"), (tmp_path, "cannot be read"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(SettingsError, match=says) as refused:
            load_settings({"secrets_file": str(path)})
        assert SECRET not in str(refused.value)


@EACH
def test_the_application_says_which_secret_serve_has_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, args: dict[str, Any]
) -> None:
    from app.builder import build

    for check in ("check_cluster", "require_startable"):
        monkeypatch.setattr(f"app.builder.{check}", lambda settings: None)
    (section, (name,)) = next((section, list(fields)) for section, fields in args.items())
    folder = {"redis_folder": str(tmp_path)}
    told = {**args, "kv": {**args.get("kv", {}), **folder}}
    with caplog.at_level(logging.WARNING):
        application: Any = build(told)
        assert f"{section}.{name}: Ray Serve has written" in caplog.text
        caplog.clear()
        build({"kv": {**folder, "redis_url": "redis://10.0.0.1:6379/0"}, "secrets_file": private(tmp_path / "s", args)})
    assert "Ray Serve has written" not in caplog.text
    ingress = application._bound_deployment
    if section == "kv":
        replica = ingress.init_args[2]._bound_deployment
        assert SECRET not in repr((ingress.init_args[:2], replica.init_args))


def test_every_setting_that_is_marked_secret_is_taken_out() -> None:
    """So the next one is, too: what is no key goes into the file."""
    secret = secret_fields(Settings)
    assert {"redis_url"} == set(secret["kv"])
    assert {"api_keys", "metrics_key", "otlp_endpoint"} == set(secret["http"])
    shown, hidden = parted({"model": "m", "kv": {"redis_url": "a", "redis_bytes": 1}, "http": {}}, secret)
    assert (shown, hidden) == ({"model": "m", "kv": {"redis_bytes": 1}, "http": {}}, {"kv": {"redis_url": "a"}})
