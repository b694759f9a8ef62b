"""Runs the core from a copy of the project without extensions, in its folder: `python core_alone.py MODEL`.

Raises where an answer with loaded KV differs from the computed one or nothing was loaded, where a router does not see
what is stored, where Redis' store does not give back what it took, and where an ingress serves what it cannot.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from configs.settings import Settings, load_settings
from deployments.segment_store.base import StoredHeader
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import Coding, SegmentCodecs
from deployments.segment_store.stored_form import stored_form
from kvmanager.extensions import plan_extensions
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.segments.server_secret import ServerSecret
from load_tests.harness.engine import Engine, greedy, prompt
from load_tests.harness.memory_port import BrainPort

SEGMENT = 128


async def check(engine: Engine) -> None:
    """Compute, load, and load a part; several at once in a pool that they do not fit, so that some are preempted."""
    counters = engine.reuse.transfer.counters
    prompts = [prompt(seed, 3 * SEGMENT + 40) for seed in range(6)]
    computed = [await _answer(engine, tokens) for tokens in prompts]
    await engine.empty_device()
    loaded = list(await asyncio.gather(*(_answer(engine, tokens) for tokens in prompts)))
    assert loaded == computed, "what was loaded answers otherwise"
    assert counters.segments_loaded > 0, "nothing was loaded"
    await engine.empty_device()
    engine.port.spoil = lambda sealed: None
    assert [await _answer(engine, tokens) for tokens in prompts] == computed, "what did not come answers otherwise"
    assert counters.loads_failed > 0, "no load has failed"


def check_routing(engine: Engine) -> None:
    """A router's mirror finds a prompt where the brain has it."""
    port: Any = engine.port
    mirror, hashes = PlacementMirror(SEGMENT // engine.block_tokens), engine.hashes(prompt(5, 3 * SEGMENT + 40))
    while True:
        deltas = port.brain.deltas_since(mirror.position, 1000)
        assert mirror.apply(deltas)
        if not deltas.more:
            break
    assert mirror.coverage(hashes, "another").cpu >= 3 * SEGMENT // engine.block_tokens


def check_redis(engine: Engine) -> None:
    """A segment is coded, indexed from its head, and comes back as it was."""
    port: Any = engine.port
    held: dict[bytes, bytes] = {}
    inner: Any = SimpleNamespace(
        get=held.get,
        put=lambda key, head, body: held.__setitem__(key, bytes(head) + bytes(body)),
        headers=lambda: [[StoredHeader(key, sealed[:8192], len(sealed)) for key, sealed in held.items()]],
    )
    coding = Coding("lossless", "lossless")
    assert stored_form(coding, engine.fingerprint) is None
    store = CheckedStore(inner, engine.fingerprint)
    coded = CodedStore(store, engine.fingerprint, SegmentCodecs(coding, inner), inner, CodecMeter(coding.codecs))
    key, (_, sealed) = next(iter(port.segments.items()))
    assert coded.put_by_tail(key, bytearray(sealed))[1] == b""
    again = coded.get(key)
    assert again is not None
    assert bytes(again) == sealed
    assert [header.key for chunk in store.scan() for header in chunk.headers] == [key]


def check_ingress(settings: Settings) -> None:
    """The ingress answers a chat over replicas that play back a script, and refuses a fidelity of an extension."""
    import app.ingress
    from app.extensions import ingress_extensions

    assert Path(app.ingress.__file__).is_relative_to(Path.cwd()), "the copy is what runs"
    assert ingress_extensions(settings) == {}
    asyncio.run(_chat(settings))


async def _chat(settings: Settings) -> None:
    from fake_backend import FakeReplicas, backend

    from app.ingress import create_app, frontend_config
    from deployments.engine.engine_args import engine_args

    replicas, secret = FakeReplicas(), ServerSecret(bytes(32))
    config = frontend_config(engine_args(settings))
    ingress = create_app(settings, config, backend(replicas), bytes(range(32)), secret, loopback=True)
    chat = {
        "model": settings.model_name,
        "messages": [{"role": "user", "content": "Where is the red ball?"}],
        "max_tokens": 3,
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(ingress), base_url="http://127.0.0.1") as client:
        plain = await client.post("/v1/chat/completions", json=chat)
        blended = await client.post("/v1/chat/completions", json={**chat, "kv_cache": {"fidelity": "blended"}})
    assert plain.status_code == 200, plain.text
    assert plain.json()["choices"][0]["message"]["content"], "a chat's answer is empty"
    assert blended.status_code == 400, blended.text
    assert len(replicas.requests) == 1


async def _answer(engine: Engine, tokens: list[int]) -> list[int]:
    last: Any = None
    async for output in engine.stream(tokens, greedy(48)):
        last = output
    return list(last.outputs[0].token_ids)


def main(model: str) -> None:
    """Start an engine with no path but whole loads."""
    import deployments.engine.handle

    assert Path(deployments.engine.handle.__file__).is_relative_to(Path.cwd()), "the copy is what runs"
    settings = load_settings(
        {
            "model": model,
            "dtype": "float32",
            "engine": {"device_blocks": 40, "max_num_batched_tokens": 512, "max_num_seqs": 8},
            "kv": {
                "segment_tokens": SEGMENT,
                "load_paths": [],
                "layerwise": {"enabled": "off"},
                "load_or_recompute": "load",
            },
        }
    )
    engine = Engine(settings, BrainPort(SEGMENT // settings.block_size_tokens))
    try:
        assert list(engine.reuse.paths) == ["whole"]
        assert plan_extensions(settings.kv.load_paths) == ()
        asyncio.run(check(engine))
        check_routing(engine)
        check_redis(engine)
    finally:
        engine.close()
    check_ingress(settings)
    left = sorted(name for name in sys.modules if name.startswith("deployments.engine.load_paths."))
    print("exact, with", *(name.removeprefix("deployments.engine.load_paths.") for name in left))


if __name__ == "__main__":
    main(sys.argv[1])
