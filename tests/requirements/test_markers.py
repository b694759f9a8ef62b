"""A lock file for all systems, reduced to the machines that crosskv runs on."""

from __future__ import annotations

import sys

import pytest

from configs.model_folder import PROJECT_ROOT

sys.path.append(str(PROJECT_ROOT / "requirements"))
from markers import reduced


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("httpx==1.0", "httpx==1.0"),
        ("colorama==0.4 ; sys_platform == 'win32'", ""),
        ("uvloop==0.23 ; platform_python_implementation != 'PyPy' and sys_platform != 'win32'", "uvloop==0.23"),
        ("backports==1 ; python_full_version < '3.11.3'", "backports==1 ; python_full_version < '3.11.3'"),
        ("cgi==1 ; python_full_version >= '3.14'", "cgi==1 ; python_full_version >= '3.14'"),
        ("later==1 ; python_full_version >= '3.15'", ""),
        ("triton==3.9 ; platform_machine == 'x86_64'", "triton==3.9 ; platform_machine == 'x86_64'"),
        ("triton==3.7 ; platform_machine == 's390x'", ""),
    ],
)
def test_markers_say_only_how_these_machines_differ(line: str, left: str) -> None:
    before, after = "# made\nfirst==1\n    # via a\n", "last==2\n    # via b\n"
    lock = f"{before}{line}\n    # via c\n{after}"
    assert reduced(lock) == before + (f"{left}\n    # via c\n" if left else "") + after


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt", "bench.txt", "dev.txt"])
def test_the_lock_files_are_reduced(name: str) -> None:
    lines = (PROJECT_ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    pins = "".join(line.removesuffix(" \\") + "\n" for line in lines if line[:1].isalnum())
    assert reduced(pins) == pins
