"""No shell decides a test's result."""

from __future__ import annotations

import locale
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

from app.launch.haproxy import haproxy_environment
from app.launch.memory import shared_memory_free_bytes
from app.launch.surroundings.folder import private_folder
from configs import machine
from configs.model_folder import PROJECT_ROOT
from tests.sizes import LONG
from tests.surroundings import MEMORY_BYTES, outside, settle

HOSTILE = {
    **dict.fromkeys(("http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
    "PYTHONPATH": "/nonexistent",
    "PYTHONWARNINGS": "error",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LC_ALL": "tr_TR.UTF-8",
    "LC_NUMERIC": "de_DE.UTF-8",
    "TZ": "Asia/Kathmandu",
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "CROSSKV_API_KEYS": "{}",
    "RAY_ADDRESS": "10.0.0.1:6379",
    "VLLM_TARGET_DEVICE": "cuda",
}


def test_what_a_shell_has_set_is_gone_and_the_rest_stays() -> None:
    kept = {"PATH": "/bin", "HOME": os.environ["HOME"], "CROSSKV_CHROMIUM": "/bin/chromium", "CROSSKV_LONG": "1"}
    environment = {**HOSTILE, **kept}
    settle(environment)
    proxies = {name for name in HOSTILE if "proxy" in name.lower()}
    set_aside = {f"OUTSIDE_{name}": HOSTILE[name] for name in proxies}
    assert environment == {**kept, **set_aside, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    assert proxies <= outside(environment).keys()
    settle(environment)  # as a process does that this one starts
    assert set_aside.keys() <= environment.keys()
    assert proxies.isdisjoint(environment)


def test_sockets_fit_below_the_folder_for_what_is_temporary(tmp_path: Path) -> None:
    for folder, kept in ((str(tmp_path / "l" / "o" / "n" / "g"), "/tmp"), ("/var/tmp", "/var/tmp")):
        environment = {"TMPDIR": folder}
        settle(environment)
        assert environment["TMPDIR"] == kept
    made = private_folder()
    try:
        assert haproxy_environment(made)
    finally:
        shutil.rmtree(made)


@pytest.mark.parametrize("home", [None, "", "/nonexistent", "relative"])
def test_without_a_home_there_is_one_for_this_run(home: str | None) -> None:
    environment = {} if home is None else {"HOME": home}
    settle(environment)
    assert os.access(environment["HOME"], os.W_OK)


def test_all_tests_believe_to_run_on_the_same_machine() -> None:
    assert machine.cpu_dtype() == "float32"
    assert machine.memory_bytes() == shared_memory_free_bytes() == MEMORY_BYTES
    assert (time.tzname[0], locale.str(0.5)) == ("UTC", "0.5")


def test_examples_are_the_same_in_each_short_run_and_have_no_deadline() -> None:
    profile = hypothesis.settings.get_profile("crosskv")
    assert hypothesis.settings().derandomize == profile.derandomize == (not LONG)
    assert profile.deadline is None


def test_a_session_in_such_a_shell_is_as_any_other() -> None:
    code = "\n".join(
        (
            "import os, sys, tests.conftest, time",
            "assert not set(os.environ) & set(sys.argv[1:]), os.environ",
            "assert (time.tzname[0], os.umask(0)) == ('UTC', 0o022)",
            "assert not sys.dont_write_bytecode",
        )
    )
    command = [sys.executable, "-c", code, *(HOSTILE.keys() - {"LC_ALL", "TZ"})]
    hostile = {**os.environ, **HOSTILE, "PYTHONWARNINGS": "ignore"}
    subprocess.run(["sh", "-c", 'umask 077; exec "$@"', "sh", *command], cwd=PROJECT_ROOT, env=hostile, check=True)
