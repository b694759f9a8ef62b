"""Processes of engines that join the cluster: Ray must not take two of them for one, however vLLM seeds them."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import ray

from configs.kv_section import KVSettings
from configs.model_folder import PROJECT_ROOT
from deployments.port.cluster_port import OpenThere

JOIN = """
import random, sys, time
from ray._private.worker import global_worker
from configs.kv_section import KVSettings
from deployments.port.cluster_port import OpenThere

def waits():
    with open(f"/proc/self/task/{global_worker.listener_thread.native_id}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))

random.seed(0)
name, address, node = sys.argv[1:]
port = OpenThere(address, "app", name, node, KVSettings())()
print("joined", flush=True)
input()
before = waits()
time.sleep(1.0)
print(waits() - before, flush=True)
input()
port.close()
"""
FEW = 20
"""How often a driver's listener waits in a second. It wakes for an error in the cluster; of two drivers with one name
each wakes the other's, a thousand times."""


def test_two_processes_with_one_seed_hear_of_errors_beside_each_other(ray_cluster: Any) -> None:
    here = ray.get_runtime_context()
    commands = [
        [sys.executable, "-c", JOIN, f"replica-{number}", here.gcs_address, here.get_node_id()] for number in range(2)
    ]
    processes = [
        subprocess.Popen(command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = []
        for awaited in ("joined", "counted"):
            for process in processes:
                assert process.stdout is not None
                line = process.stdout.readline().strip()
                assert line, f"{awaited}: a process has ended"
                said.append(line)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        assert [process.wait() for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert said[:2] == ["joined", "joined"]
    assert all(int(waits) < FEW for waits in said[2:]), said


def test_joining_draws_numbers_of_its_own_and_leaves_the_engine_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []

    class JoinedError(Exception):
        pass

    def joining(**how: Any) -> None:
        drawn.append(random.getrandbits(224))
        raise JoinedError

    monkeypatch.setattr(ray, "init", joining)
    there = OpenThere("127.0.0.1:1", "app", "replica", "node", KVSettings())
    kept = random.getstate()
    try:
        for _ in range(2):
            random.seed(0)
            with pytest.raises(JoinedError):
                there()
            assert random.random() == random.Random(0).random()
    finally:
        random.setstate(kept)
    assert drawn[0] != drawn[1]
