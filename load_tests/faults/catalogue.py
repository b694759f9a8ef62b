"""The faults: how to cause each in a running server of real parts, and how to end it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deployments.protocol.secret_file import server_secret
from kvmanager.segments.format import SegmentHeader, read_header
from kvmanager.segments.guard import SegmentGuard
from load_tests.faults.inside import Inside
from load_tests.faults.redis_process import PASSWORD, Proxy, RedisProcess
from load_tests.harness.server import RunningServer, ServerError, started


@dataclass(frozen=True)
class World:
    """A server whose Redis is `redis`, reached through `proxy`, and whose actors are reached through `inside`."""

    server: RunningServer
    redis: RedisProcess
    proxy: Proxy
    inside: Inside

    def stored_headers(self) -> dict[bytes, SegmentHeader]:
        """What the segments in Redis say of themselves, by the names that they lie under."""
        client = self.redis.client
        guard = SegmentGuard(server_secret(self.server.model_folder.parent / "redis", {}))
        heads: dict[bytes, Any] = {name: client.hget(name, "h") for name in self.redis.segment_keys()}
        return {name: read_header(guard.open_header(head)) for name, head in heads.items() if head is not None}


@contextlib.contextmanager
def started_world(folder: Path, settings: Mapping[str, Any], redis_password: str = PASSWORD) -> Iterator[World]:
    """A server with these settings, and all that is needed to disturb it. Everything written lies in `folder`.

    Where Redis wants another password than the server has, the server is one with two tiers.
    """
    redis = RedisProcess(folder / "their-redis")
    redis.change_password(redis_password)
    proxy = Proxy(redis.port)
    wanted_status = "ok" if redis_password == PASSWORD else "degraded"
    # What is stored is loaded even where this machine, while it is busy, would recompute it sooner.
    kv = {"load_or_recompute": "load", **settings.get("kv", {}), "redis_url": proxy.url}
    try:
        with started(folder, {**settings, "kv": kv}, wanted_status) as server:
            inside = Inside(server)
            try:
                yield World(server, redis, proxy, inside)
            finally:
                inside.close()
    finally:
        proxy.close()
        redis.stop()


@dataclass(frozen=True)
class Fault:
    """`inject` causes it on entry and ends it on exit.

    `parked_in`: the tier that holds the requests' KV when it strikes. `missing`: the part of /health that must say so
    while it lasts (empty: no state changes, or too briefly to be seen). `strikes_at_once`: the streams that begin do so
    while it strikes, and not after it.
    `ratio`: of what blended prompts reuse, the share that is recomputed. With 1 every answer equals an exact one's,
    whatever was found of its documents, unless the blend goes wrong. With less it does so only where nothing is found:
    such a fault has to take everything, and strikes while no request is under way.
    `breaks`: it takes the streams that run and those that begin under it; none has a wrong token all the same.
    `spares`: the processes whose command line begins so are the same ones afterwards.
    """

    part: str
    name: str
    inject: Callable[[World], contextlib.AbstractContextManager[Any]]
    parked_in: str = "redis"
    missing: str = ""
    strikes_at_once: bool = False
    ratio: float = 1.0
    breaks: bool = False
    spares: str = ""


@contextlib.contextmanager
def _redis_stopped(world: World) -> Iterator[None]:
    world.redis.stop()
    yield
    world.redis.start()


@contextlib.contextmanager
def _redis_restarted_empty(world: World) -> Iterator[None]:
    world.redis.stop()
    world.redis.start_empty()
    yield


@contextlib.contextmanager
def _redis_slow(world: World) -> Iterator[None]:
    world.proxy.delay_s = 1.0
    yield
    world.proxy.delay_s = 0.0


@contextlib.contextmanager
def _redis_deaf(world: World) -> Iterator[None]:
    world.proxy.deaf = True
    yield
    world.proxy.deaf = False


@contextlib.contextmanager
def _redis_full(world: World) -> Iterator[None]:
    client = world.redis.client
    client.config_set("maxmemory", 1)
    yield
    client.config_set("maxmemory", 0)


@contextlib.contextmanager
def _redis_emptied(world: World) -> Iterator[None]:
    """Empty Redis without telling any part of the server."""
    world.redis.client.flushall()
    yield


@contextlib.contextmanager
def _redis_flipped(world: World) -> Iterator[None]:
    """One bit of every segment."""
    for name in world.redis.segment_keys():
        _flip(world.redis.client, name, name)
    yield


@contextlib.contextmanager
def _redis_spoilt(world: World) -> Iterator[None]:
    """Spoils every segment, each prompt's in a way of its own; nothing is ended: the server has to throw them away."""
    client = world.redis.client
    prompts = _stored_prompts(world)
    if len(prompts) < len(_SPOILERS):
        raise ServerError(f"{len(prompts)} prompts in Redis are too few for {len(_SPOILERS)} ways to spoil them")
    for names, spoil in zip(prompts, itertools.cycle(_SPOILERS)):
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            if client.exists(name, other) == 2:  # neither was thrown away meanwhile
                spoil(client, name, other)
    yield


def _stored_prompts(world: World) -> list[list[bytes]]:
    """The names that segments lie under in Redis: a list for each prompt, in the order of the prompt."""
    prompts: dict[bytes, list[bytes]] = {}
    roots: dict[bytes, bytes] = {}
    for name, header in sorted(world.stored_headers().items(), key=lambda pair: pair[1].start_block):
        roots[header.key] = roots.get(header.parent or b"", header.key)
        prompts.setdefault(roots[header.key], []).append(name)
    return list(prompts.values())


def _wrong_type(client: Any, key: bytes, other: bytes) -> None:
    client.delete(key)
    client.rpush(key, "not a segment")


def _flip(client: Any, key: bytes, other: bytes) -> None:
    part = bytearray(client.hget(key, "0"))
    part[len(part) // 2] ^= 1
    client.hset(key, "0", bytes(part))


def _truncate(client: Any, key: bytes, other: bytes) -> None:
    client.hset(key, "0", client.hget(key, "0")[:-7])


def _swap(client: Any, key: bytes, other: bytes) -> None:
    fields = client.hgetall(other)
    client.delete(key)
    client.hset(key, mapping=fields)


_SPOILERS = (_wrong_type, _flip, _truncate, _swap)


def _killed(title: str) -> Callable[[World], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        for process in world.server.processes(title):
            process.send_signal(signal.SIGKILL)
        yield

    return inject


@contextlib.contextmanager
def _worker_killed_mid_segment(world: World) -> Iterator[None]:
    world.proxy.delay_s = 0.3  # so that segments are on their way when the workers die
    with _killed("ray::PrefetchWorker")(world):
        yield
    world.proxy.delay_s = 0.0


@contextlib.contextmanager
def _one_replica_killed(world: World) -> Iterator[None]:
    world.server.processes("ray::ServeReplica:crosskv:Replica")[0].send_signal(signal.SIGKILL)
    yield


def _one_engine(number: signal.Signals) -> Callable[[World], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        world.server.processes("VLLM::EngineCore")[0].send_signal(number)
        yield

    return inject


def _hanging(title: str) -> Callable[[World], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        processes = world.server.processes(title)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        yield
        for process in processes:
            with contextlib.suppress(Exception):
                process.send_signal(signal.SIGCONT)

    return inject


def _stopped(title: str, seconds: float) -> Callable[[World], contextlib.AbstractContextManager[Any]]:
    """It stands still for `seconds`, whatever is done meanwhile."""

    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        processes = world.server.processes(title)
        if not processes:
            raise ServerError(f"no process of the server is called {title!r}")
        with contextlib.ExitStack() as stack:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
                timer = threading.Timer(seconds, _goes_on, (process,))
                stack.callback(timer.join)
                timer.start()
            yield

    return inject


def _goes_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGCONT)


def _together(*faults: Fault) -> Callable[[World], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault.inject(world))
            yield

    return inject


def _called(action: str, undo: str = "") -> Callable[[World], contextlib.AbstractContextManager[Any]]:
    """A fault that is caused inside an actor, by a function of `load_tests.faults.inside`; without `undo` it passes."""

    @contextlib.contextmanager
    def inject(world: World) -> Iterator[None]:
        world.inside.do(action)
        yield
        if undo:
            world.inside.do(undo)

    return inject


_tier_shrunk = _called("shrink_tier", "undo_shrink_tier")
_replies_lost = _called("lose_replies", "undo_lose_replies")

FAULTS = (
    Fault("Redis", "stopped", _redis_stopped, missing="redis"),
    Fault("Redis", "restarted empty", _redis_restarted_empty),
    Fault("Redis", "answers after 1 s", _redis_slow, missing="redis"),
    Fault("Redis", "half-open connection", _redis_deaf, missing="redis"),
    Fault("Redis", "out of memory", _redis_full),
    Fault("Redis", "wrong type, flipped, truncated and swapped values", _redis_spoilt),
    Fault("CPU tier", "killed", _killed("ray::CPUTier"), parked_in="cpu"),
    Fault("CPU tier", "hangs", _hanging("ray::CPUTier"), parked_in="cpu"),
    Fault("CPU tier", "budget shrunk", _tier_shrunk, parked_in="cpu"),
    Fault("CPU tier", "object lost", _called("lose_objects"), parked_in="cpu"),
    Fault("prefetch worker", "killed mid-segment", _worker_killed_mid_segment),
    Fault("manager", "killed", _killed("ray::KVManagerActor"), missing="kv_manager"),
    Fault("manager", "hangs", _hanging("ray::KVManagerActor"), missing="kv_manager"),
    Fault("manager", "replies lost", _replies_lost),
    Fault("replica", "killed mid-stream", _one_replica_killed, strikes_at_once=True, missing="replicas"),
    Fault("replica", "engine exception", _called("break_engine"), strikes_at_once=True, missing="replicas"),
    Fault("replica", "engine hangs", _called("hang_engine"), strikes_at_once=True, missing="replicas"),
)

_REPLICAS = "ray::ServeReplica"
_CONTROLLER, _INGRESS, _HAPROXY = "ray::ServeController", "ray::ServeReplica:crosskv:Ingress", "haproxy"
_SURROUNDINGS = {
    "Serve's controller": _CONTROLLER,
    "HAProxy": _HAPROXY,
    "ingress": _INGRESS,
    "GCS": "gcs_server",
    "raylet": "raylet",
}
"""Title by name."""
SURROUNDING_FAULTS = (
    Fault("Serve's controller", "killed", _killed(_CONTROLLER), spares=_REPLICAS),
    Fault("HAProxy", "killed", _killed(_HAPROXY), breaks=True, spares=_REPLICAS),
    Fault("ingress", "killed", _killed(_INGRESS), breaks=True, spares="ray::ServeReplica:crosskv:Replica"),
    *(
        Fault(name, f"stands still for {seconds} s", _stopped(title, seconds), spares=_REPLICAS)
        for seconds in (5, 25)
        for name, title in _SURROUNDINGS.items()
    ),
)
"""Of what is around the engines and the cache. The death of GCS or of the only raylet ends a server of one node."""
_BY_NAME = {f"{fault.part}: {fault.name}": fault for fault in FAULTS}
_PAIRS = (
    ("Redis: out of memory", "manager: killed"),
    ("replica: killed mid-stream", "CPU tier: killed"),
    ("Redis: answers after 1 s", "manager: killed"),
    ("CPU tier: hangs", "replica: killed mid-stream"),
    ("Redis: stopped", "CPU tier: killed"),
    ("manager: hangs", "replica: killed mid-stream"),
)
PAIRED_FAULTS = tuple(
    Fault("pair", " and ".join(names), _together(*(_BY_NAME[name] for name in names)), strikes_at_once=True)
    for names in _PAIRS
)
"""Two at once."""

ENGINE_FAULTS = (
    Fault("engine", "process killed", _one_engine(signal.SIGKILL), strikes_at_once=True, missing="replicas"),
    Fault("engine", "process stands still", _one_engine(signal.SIGSTOP), strikes_at_once=True, missing="replicas"),
)
"""Of a server whose engines have processes of their own (`engine.process`)."""

BLEND_FAULTS = (
    Fault("blend", "chunks lost in the CPU tier", _called("lose_objects"), parked_in="cpu", strikes_at_once=True),
    Fault("blend", "CPU tier killed", _killed("ray::CPUTier"), parked_in="cpu", strikes_at_once=True),
    Fault(
        "blend",
        "CPU tier's budget shrunk",
        _tier_shrunk,
        parked_in="cpu",
        strikes_at_once=True,
    ),
    Fault("blend", "Redis answers after 1 s", _redis_slow, missing="redis", strikes_at_once=True),
    Fault("blend", "Redis emptied", _redis_emptied, strikes_at_once=True),
    Fault("blend", "chunks damaged in Redis", _redis_flipped, ratio=0.0),
    Fault("blend", "manager killed", _killed("ray::KVManagerActor"), missing="kv_manager", strikes_at_once=True),
    Fault("blend", "manager's replies lost", _replies_lost, strikes_at_once=True),
)
"""While blended prompts run. `parked_in` holds their chunks."""
