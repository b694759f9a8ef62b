"""What the keyed checksum of segments in Redis costs, and their encryption, in percent of a Redis load.

A load is what a prefetch worker does: all parts of a segment from a real Redis over a unix socket, every check, and, as
`kv.redis_codec` says, decoding. Three arms take turns with every single segment, in an order that rotates: without a
guard, with the keyed checksum, encrypted. Two ratios to the arm without are stated. *Time*: the fastest load of each
arm, which tells what it takes when nothing else has the core. *CPU*: the worker's own processor time, each load beside
its neighbour without a guard, median and quartiles; it hardly feels what else runs on the machine.
`python -m load_tests.micro.guard_cost [--rounds N] [--json FILE]`; some minutes, one core.
"""

from __future__ import annotations

import gc
import hashlib
import hmac
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import typer
import xxhash
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from deployments.cpu_tier.prefetch_worker import keep_freed_memory
from deployments.segment_store.base import SegmentStore
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.endpoint import GuardedStore, RedisEndpoint, open_profiles
from deployments.segment_store.redis_store import RedisStore
from deployments.segment_store.segment_codecs import Coding, SegmentCodecs
from kvmanager.segments.format import SegmentHeader, seal
from kvmanager.segments.guard import SegmentGuard
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.spans import MARK_BYTES, NodeKind, SegmentSpan
from load_tests.harness.engine import SECRET
from load_tests.harness.memory_port import made_up_hashes
from load_tests.harness.tiers import MIB, own_redis
from load_tests.measuring import report
from load_tests.measuring.command import JsonFile, Rounds, out
from load_tests.measuring.turns import rotated

FINGERPRINT = b"g" * 32
SHAPES = {"0.5B": (24, 2, 256, 2, 64), "8B": (32, 2, 256, 8, 128)}
"""256 tokens in bfloat16: 3 MiB and 32 MiB."""
SEGMENTS = {"0.5B": 8, "8B": 3}
CODINGS = {"raw": Coding("raw", "int8"), "lossless": Coding("lossless", "int8")}
ARMS = ("none", "keyed", "encrypted")
WARM_UP_ROUNDS = 2
PATIENCE_S = 60.0
COLUMNS = {
    "model": "{0.model}",
    "codec": "{0.codec}",
    "": "{0.what}",
    "arm": "{0.arm}",
    "fastest": "{0.fastest_ms:.2f} ms",
    "time": "{0.time_percent:+.1f} %",
    "CPU": "{0.cpu_percent[1]:+.1f} % ({0.cpu_percent[0]:+.1f} … {0.cpu_percent[2]:+.1f})",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one arm beside the one without a guard, to load or to store a segment."""

    model: str
    codec: str
    what: str
    arm: str
    fastest_ms: float
    time_percent: float
    """Added, by the fastest of each arm."""
    cpu_percent: tuple[float, float, float]
    """Added to the worker's processor time: lower quartile, median, upper quartile."""


def arms(endpoint: RedisEndpoint, codecs: SegmentCodecs) -> dict[str, CodedStore]:
    """The stores that take turns; each has segments of its own in Redis."""

    def arm(name: str, guarded: Callable[[SegmentStore], SegmentStore]) -> CodedStore:
        transport = RedisStore(endpoint.url, endpoint.prefix + name.encode() + b":", PATIENCE_S, 0)
        checked = CheckedStore(guarded(transport), FINGERPRINT)
        return CodedStore(checked, FINGERPRINT, codecs, open_profiles(endpoint), CodecMeter())

    def guard(encrypts: bool) -> Callable[[SegmentStore], SegmentStore]:
        return lambda below: GuardedStore(below, SegmentGuard(SECRET, encrypts=encrypts), secrets.token_bytes)

    guards = (lambda below: below, guard(False), guard(True))
    return {name: arm(name, guarded) for name, guarded in zip(ARMS, guards, strict=True)}


def segment(model: str, number: int) -> tuple[bytes, Any]:
    """A sealed segment of normally distributed values, and its key."""
    shape = SHAPES[model]
    key, blocks = number.to_bytes(32, "little"), shape[2] // 32
    span = SegmentSpan(SegmentKey(key), None, 0, blocks, NodeKind.REQUEST, blocks * key[:MARK_BYTES])
    header = SegmentHeader.raw(span, made_up_hashes(span), FINGERPRINT, shape, "bfloat16")
    buffer = np.zeros(header.sealed_bytes, np.uint8)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
    buffer[header.body_offset :] = values.view(torch.uint8).numpy().reshape(-1)
    seal(buffer.data, header)
    return key, buffer


@dataclass(slots=True)
class Taken:
    """Seconds by the clock, and of this thread's processor time, of each call of one arm."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def by(self, call: Callable[[], Any]) -> None:
        """Make a call and note what it takes."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        call()
        self.cpu.append(time.thread_time() - cpu_began)
        self.wall.append(time.perf_counter() - began)


def measure(stores: dict[str, CodedStore], model: str, codec: str, rounds: int) -> list[Cost]:
    """Let the arms take turns."""
    held = [segment(model, 1 + number) for number in range(SEGMENTS[model])]
    names = list(stores)
    taken: dict[str, dict[str, Taken]] = {}
    for turn in range(-WARM_UP_ROUNDS, rounds):
        if turn <= 0:  # what came before was to warm up
            taken = {what: {name: Taken() for name in names} for what in ("load", "store")}
        gc.collect()
        for place, (key, buffer) in enumerate(held):
            for name in rotated(names, turn + place):
                store = stores[name]
                taken["store"][name].by(lambda: store.put(key, buffer.data))  # noqa: B023
            for name in rotated(names, turn + place):
                store = stores[name]
                taken["load"][name].by(lambda: store.get(key))  # noqa: B023
    for key, buffer in held:
        for name, store in stores.items():
            found = store.get(key)
            assert found is not None, name
            assert bytes(found) == buffer.tobytes(), name
    return [
        Cost(
            model,
            codec,
            what,
            name,
            1000 * min(of[name].wall),
            100 * (min(of[name].wall) / min(of["none"].wall) - 1),
            _percent(of[name].cpu, of["none"].cpu),
        )
        for what, of in taken.items()
        for name in names
    ]


def primitives() -> dict[str, float]:
    """Bytes per second of processor time: what could have been the keyed checksum, and what is; best of some."""
    content, key, made = secrets.token_bytes(8 * MIB), bytes(32), bytearray(8 * MIB + 16)

    def gmac() -> None:
        encryptor = Cipher(algorithms.AES256(key), modes.GCM(bytes(12))).encryptor()
        encryptor.authenticate_additional_data(content)
        encryptor.finalize()

    def gcm() -> None:
        encryptor = Cipher(algorithms.AES256(key), modes.GCM(bytes(12))).encryptor()
        encryptor.update_into(content, made)
        encryptor.finalize()

    calls: dict[str, Callable[[], Any]] = {
        "xxh3_128 (no key)": lambda: xxhash.xxh3_128_digest(content),
        "HMAC-SHA256": lambda: hmac.digest(key, content, "sha256"),
        "BLAKE2b": lambda: hashlib.blake2b(content, key=key).digest(),
        "AES-256-GMAC": gmac,
        "AES-256-GCM": gcm,
    }
    return {name: len(content) / _fastest(call) for name, call in calls.items()}


def _fastest(call: Callable[[], Any]) -> float:
    taken = Taken()
    for _ in range(15):
        taken.by(call)
    return min(taken.cpu)


def _percent(arm: list[float], none: list[float]) -> tuple[float, float, float]:
    lower, median, upper = statistics.quantiles(
        [100 * (ours / theirs - 1) for ours, theirs in zip(arm, none, strict=True)], n=4
    )
    return lower, median, upper


def main(rounds: Rounds = 40, json_file: JsonFile = None) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker
    speeds = primitives()
    costs: list[Cost] = []
    with own_redis(2048 * MIB) as server:
        for codec, coding in CODINGS.items():
            for model in SHAPES:
                out.print(f"{model} {codec}")
                prefix = f"crosskv:1:bench:{codec}{model}:".encode()
                endpoint = RedisEndpoint(server.url, prefix, FINGERPRINT, PATIENCE_S, 0, SECRET)
                codecs = SegmentCodecs(coding, open_profiles(endpoint))
                codecs.warm_up()
                costs += measure(arms(endpoint, codecs), model, codec, rounds)
    speed = report.table(["keyed checksum", "GB/s"], [[name, f"{of / 1e9:.1f}"] for name, of in speeds.items()])
    found = {"rounds": rounds, "bytes_per_s": speeds, "costs": [asdict(cost) for cost in costs]}
    report.deliver(f"{speed}\n\n{report.rows(COLUMNS, costs)}", found, json_file)


if __name__ == "__main__":
    typer.run(main)
