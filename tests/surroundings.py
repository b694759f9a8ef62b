"""What must not decide a test's result: the shell's environment, the user's home, and the machine's facts.

`settle` is called before anything else is imported, so that all processes that tests start inherit it. The facts that
`configs.machine` finds are the same for all tests; what asks for them is tested under both kinds of processor
(`each_processor`). A test that is about the real machine takes `own_machine`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import locale
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from configs import machine
from tests.sizes import LONG

GIB = 1024**3
MEMORY_BYTES = 24 * GIB
"""Of the machine that all tests believe to have, and of its /dev/shm."""
PROCESSORS = ("float32", "bfloat16")
"""What a processor without, and with instructions for bfloat16 computes fast. The first one is every test's."""
PROCESSOR_KIND = "vec, AVX512"
SHARED_MEMORY = "/dev/shm"

OWN_PREFIXES = ("CROSSKV_", "RAY_", "VLLM_", "LC_")
"""Variables that would change what is tested: another Ray, another tenant's key, numbers with commas."""
OWN_NAMES = frozenset(
    {
        *("pythonpath", "pythonhome", "pythonwarnings", "pythonoptimize", "pythonstartup", "pythonioencoding"),
        "pythondontwritebytecode",
        *("language", "columns", "lines", "no_color", "force_color", "py_colors", "github_actions"),
        *("hf_token", "openai_api_key", "openai_base_url", "anthropic_api_key", "anthropic_base_url"),
    }
)
"""In small letters; some programs read the one spelling, some the other."""
PROXIES = frozenset(f"{scheme}_proxy" for scheme in ("http", "https", "ftp", "all", "no"))
"""The same. Tests ask servers of this machine; what one fetches from elsewhere goes with `outside`."""
KEPT_AS = "OUTSIDE_"
FOR_TESTS = frozenset(
    {"CROSSKV_LONG", "CROSSKV_OPERATIONS", "CROSSKV_CHROMIUM", "CROSSKV_SCREENSHOT", "CROSSKV_MUTANT_FAILURES"}
)


LONGEST_TMPDIR = 12
"""Bytes. HAProxy's sockets have room for no more: `app.launch.haproxy` does without it below a longer one."""


def settle(environment: MutableMapping[str, str]) -> None:
    """Take from `environment` what a shell may have put there, and set what a shell may lack."""
    for name in [one for one in environment if one.lower() in PROXIES]:
        environment[KEPT_AS + name] = environment.pop(name)
    for name in list(environment):
        if name not in FOR_TESTS and (name.startswith(OWN_PREFIXES) or name.lower() in OWN_NAMES):
            del environment[name]
    environment.update(LANG="C.UTF-8", LC_ALL="C.UTF-8", TZ="UTC")
    if len(os.fsencode(environment.get("TMPDIR", ""))) > LONGEST_TMPDIR and _writable("/tmp"):
        environment["TMPDIR"] = "/tmp"
    if not _writable(environment.get("HOME", "")):
        environment["HOME"] = _home()


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a program that fetches something from elsewhere: with the proxies that the shell had."""
    kept = {name: value for name, value in environment.items() if name.startswith(KEPT_AS)}
    return {**environment, **{name.removeprefix(KEPT_AS): value for name, value in kept.items()}}


def _writable(folder: str) -> bool:
    return Path(folder).is_absolute() and os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def _home() -> str:
    """A home for this run, where the user has none."""
    folder = tempfile.mkdtemp(prefix="crosskv-home-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


settle(os.environ)
sys.dont_write_bytecode = False  # each process would rewrite the asserts of all tests, for half a minute
tempfile.tempdir = None  # pytest may have asked for it by now
time.tzset()
with contextlib.suppress(locale.Error):  # a system without C.UTF-8 keeps its own
    locale.setlocale(locale.LC_ALL, "")
os.umask(0o022)

# A run of `make test` tries the same examples as the one before it; `make test-long` tries others each time. A slow
# machine is no failure: neither an example nor the making of examples has a deadline.
hypothesis.settings.register_profile(
    "crosskv", derandomize=not LONG, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("crosskv")


class _Facts:
    """What `configs.machine` and /dev/shm say: the real ones, and those of all tests."""

    def __init__(self) -> None:
        self._real: dict[str, Any] = {
            name: getattr(machine, name) for name in ("cpu_dtype", "memory_bytes", "processor_kind")
        }
        self._real_statvfs = os.statvfs

    def fix(self, patch: pytest.MonkeyPatch, cpu_dtype: str = PROCESSORS[0]) -> None:
        """A machine of MEMORY_BYTES, all of it in /dev/shm, with processors of this kind."""
        patch.setattr(machine, "cpu_dtype", lambda: cpu_dtype)
        patch.setattr(machine, "memory_bytes", lambda: MEMORY_BYTES)
        patch.setattr(machine, "processor_kind", lambda dtype: PROCESSOR_KIND)
        blocks = MEMORY_BYTES // 4096
        free = SimpleNamespace(f_blocks=blocks, f_bfree=blocks, f_bavail=blocks, f_frsize=4096)
        patch.setattr(os, "statvfs", lambda path: free if str(path) == SHARED_MEMORY else self._real_statvfs(path))

    def free(self, patch: pytest.MonkeyPatch) -> None:
        """This machine."""
        for name, real in self._real.items():
            patch.setattr(machine, name, real)
        patch.setattr(os, "statvfs", self._real_statvfs)


_FACTS = _Facts()


@pytest.fixture(scope="session", autouse=True)
def _known_machine() -> Iterator[None]:
    """The machine of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        _FACTS.fix(patch)
        yield


@pytest.fixture
def own_machine() -> Iterator[None]:
    """The machine as it is, for a test that asks just that: the next one has that of all tests again."""
    with pytest.MonkeyPatch.context() as patch:
        _FACTS.free(patch)
        yield


@pytest.fixture(scope="module", params=PROCESSORS)
def each_processor(request: pytest.FixtureRequest) -> Iterator[str]:
    """A CPU machine, with both kinds of processor one after the other: what the kind computes fast."""
    with pytest.MonkeyPatch.context() as patch:
        _FACTS.fix(patch, request.param)
        patch.setattr(machine, "accelerator", lambda: "cpu")
        yield request.param
