"""The manager directs a replica: from its index to a real engine's device pool and back. No Ray; bytes in memory."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine, handle_of
from managed_port import FINGERPRINT, NODE, REPLICA, Client, Handle, ManagedPort

from deployments.engine.directive_runner import DirectiveRunner
from deployments.manager import actor
from deployments.manager import directive_sender as direction
from deployments.manager.replica_state import MISSED_POLLS_S, QueuedDirective
from deployments.protocol.engine_facts import EngineFacts
from deployments.replica.manager_link import ManagerLink
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Clear, DirectiveResult, Evict, Move, Onboard, Outcome
from load_tests.harness.engine import prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until

TOKENS = 12 * BLOCK + 16
SHORT_S = 0.2
"""What a directive has that is to be late."""


@pytest.fixture
def directed(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, patient: None
) -> Iterator[Callable[..., ManagedPort]]:
    """Gives the engine a manager that it obeys; of the manager's settings the test may give some."""
    monkeypatch.setattr(actor, "EVERY_S", 0.02)
    started: list[Any] = []

    def start(**config: Any) -> ManagedPort:
        port = ManagedPort(**config)
        engine.port = port

        async def obey() -> ManagerLink:
            client: Any = Client(port)
            switch: Any = port
            return ManagerLink(client, REPLICA, lambda: 0, NODE, handle_of(engine, switch, REPLICA, NODE, FINGERPRINT))

        started.extend((port, engine.run(obey())))
        until(lambda: port.ask("api", "parts")["replicas"], "the replica is registered")
        return port

    yield start
    port, taker = started
    engine.settle()

    async def stop() -> None:
        taker.close()

    engine.run(stop())
    engine.port = MemoryPort()
    engine.reuse.order_device(True).result()
    port.close()


def outcomes(port: ManagedPort) -> dict[str, dict[str, int]]:
    return dict(port.ask("api", "stats")["directives"]["outcomes"])


def on_device(engine: LiveEngine, tokens: Sequence[int]) -> int:
    return int(engine.port.ask("api", "lookup", engine.hashes(tokens))["device"]["0"])


def test_what_the_manager_promotes_is_on_the_device_exact_and_counts_no_use(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens = directed(), prompt(900, TOKENS)
    computed, _ = engine.ask(tokens)
    engine.clear_device()
    before = port.ask("api", "lookup", engine.hashes(tokens))["segments"]

    ended = port.ask("api", "direct", "promote", 0, engine.hashes(tokens), 10.0)

    assert ended == {"kind": "promote", "outcome": "done", "segments": 3, "blocks": 12}
    assert on_device(engine, tokens) == 12, "the manager knows when the order has ended"
    found = port.ask("api", "lookup", engine.hashes(tokens))
    assert [segment["uses"] for segment in found["segments"]] == [segment["uses"] for segment in before]
    stats = port.ask("api", "stats")
    assert stats["leases"] == 0
    assert stats["directives"]["blocks"] == {"promote": 12}
    assert stats["directives"]["worst_step_s"]["promote"] > 0
    answer, by_tier = engine.ask(tokens, planned=False)
    assert (answer, by_tier["device"]) == (computed, 12 * BLOCK)
    assert port.ask("api", "direct", "promote", 0, engine.hashes(tokens), 10.0)["blocks"] == 0


def test_a_corrupt_segment_ends_a_promotion_and_is_reported(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens = directed(), prompt(901, TOKENS)
    computed, _ = engine.ask(tokens)
    engine.clear_device()
    port.spoil = lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])

    ended = port.ask("api", "direct", "promote", 0, engine.hashes(tokens), 10.0)

    assert (ended["outcome"], ended["blocks"]) == ("failed", 0)
    assert ended["message"]
    assert port.bad == ["checksum"]
    assert on_device(engine, tokens) == 0
    port.spoil = lambda sealed: sealed
    assert engine.ask(tokens)[0] == computed


def test_what_the_tier_lost_is_offloaded_again_by_order(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens = directed(), prompt(902, TOKENS)
    computed, _ = engine.ask(tokens)
    hashes = engine.hashes(tokens)
    port.ask("api", "clear", ["cpu"], 5.0)
    assert port.segments == {}

    ended = port.ask("api", "direct", "offload", REPLICA, hashes, 10.0)

    assert ended == {"kind": "offload", "outcome": "done", "segments": 3, "blocks": 12}
    assert port.ask("api", "lookup", hashes)["cpu"] == 12
    engine.clear_device()
    assert engine.ask(tokens) == (computed, {"device": 0, "cpu": 384, "redis": 0, "recomputed": 16})
    assert port.ask("api", "direct", "offload", REPLICA, hashes, 10.0)["outcome"] == "done", "nothing is left to do"


def test_what_is_hot_on_a_device_and_in_no_tier_is_offloaded_unasked(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens = directed(), prompt(903, TOKENS)
    for _ in range(2):
        engine.ask(tokens)
    port.segments.clear()
    port.ask("register_tier", NODE, Handle(port), "second life", 1 << 40, [], [])  # it was restarted, and is empty

    until(lambda: port.ask("api", "lookup", engine.hashes(tokens))["cpu"] == 12, "the tier has it again")

    until(lambda: outcomes(port).get("offload") == {"done": 1}, "the directive has ended")


def test_a_promotion_that_waits_for_its_tier_holds_up_no_other_order(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens, other = directed(), prompt(911, TOKENS), prompt(912, TOKENS)
    engine.ask(tokens)
    engine.clear_device()
    engine.ask(other)
    gate = threading.Event()
    port.before_fetch = gate.wait
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(port.ask("api", "direct", "promote", 0, engine.hashes(tokens), PATIENCE_S))
    )
    asking.start()
    until(lambda: engine.blocks_in_use() == 12, "the promotion is under way")

    assert port.ask("api", "direct", "evict", 0, engine.hashes(other), 10.0)["blocks"] == 12
    assert not answers
    gate.set()

    asking.join(patience(PATIENCE_S))
    assert answers[0]["outcome"] == "done"


def test_a_tier_that_was_cleared_by_order_is_not_filled_again_unasked(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens = directed(), prompt(913, TOKENS)
    for _ in range(2):
        engine.ask(tokens)
    port.ask("api", "clear", ["cpu"], 5.0)
    for _ in range(10):
        port.ask("api", "stats")
        engine.run(asyncio.sleep(actor.EVERY_S))
    assert port.segments == {}
    assert "offload" not in outcomes(port)


def test_an_eviction_and_a_promotion_are_carried_out(engine: LiveEngine, directed: Callable[..., ManagedPort]) -> None:
    port, tokens = directed(), prompt(904, TOKENS)
    engine.ask(tokens)
    hashes = engine.hashes(tokens)
    assert port.ask("api", "direct", "evict", 0, hashes, 10.0)["blocks"] == 12
    assert on_device(engine, tokens) == 0
    assert port.ask("api", "direct", "promote", 0, hashes, 10.0)["blocks"] == 12


def test_orders_that_cannot_be_carried_out_are_answered_in_words(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, hashes = directed(), engine.hashes(prompt(905, TOKENS))
    for replica in (7, "stranger"):
        answer = port.ask("api", "direct", "promote", replica, hashes, 10.0)
        assert answer["message"] == f"There is no replica {replica}."
    for kind in ("promote", "offload", "evict"):
        answer = port.ask("api", "direct", kind, 0, hashes, 10.0)
        assert (answer["outcome"], bool(answer["message"])) == ("refused_gone", True), kind
    assert port.ask("api", "move", Move(0, 7, hashes), 10.0)["message"] == "There is no replica 7."
    with pytest.raises(ValueError, match="'explode' is not a valid DirectiveKind"):
        port.ask("api", "direct", "explode", 0, hashes, 10.0)
    assert port.ask("api", "pin", hashes, 60.0)["refused"] == "unknown_key"
    assert port.ask("api", "unpin", hashes)["refused"] == "unknown_key"


def test_a_pin_in_the_shared_tiers_is_granted_and_ended(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port, tokens = directed(pin_budget_bytes=1 << 30), prompt(906, TOKENS)
    engine.ask(tokens)
    hashes = engine.hashes(tokens)
    assert port.ask("api", "pin", hashes, 60.0)["segments"] == 3
    assert port.ask("api", "pin", hashes, -1.0)["refused"] == "bad_value"
    assert port.ask("api", "unpin", hashes) == {"unpinned": 1}


def test_a_directive_that_the_engine_is_too_busy_for_is_refused_as_late(
    engine: LiveEngine, directed: Callable[..., ManagedPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direction, "GRACE_S", PATIENCE_S)
    port, tokens, hashes = directed(), prompt(907, TOKENS), engine.hashes(prompt(907, TOKENS))
    engine.ask(tokens)
    engine.clear_device()
    busy, begun, carry_out = threading.Event(), threading.Event(), DirectiveRunner.carry_out

    async def watched(self: DirectiveRunner, order: Any) -> Any:
        carried_out = asyncio.ensure_future(carry_out(self, order))
        await asyncio.sleep(0)  # now it counts its seconds
        begun.set()
        return await carried_out

    monkeypatch.setattr(DirectiveRunner, "carry_out", watched)
    engine.thread.call(busy.wait)
    with ThreadPoolExecutor() as asking:
        asked = asking.submit(port.ask, "api", "direct", "promote", 0, hashes, SHORT_S)
        until(lambda: begun.is_set() or asked.done(), "it waits for the engine")
        time.sleep(SHORT_S)
        busy.set()
        ended = asked.result(patience(PATIENCE_S))

    assert ended["outcome"] == "refused_late"
    assert outcomes(port)["promote"] == {"refused_late": 1}
    assert on_device(engine, tokens) == 0


def test_what_is_too_late_when_a_replica_polls_is_not_given_to_it() -> None:
    sender = direction.DirectiveSender(KVManager(ManagerConfig(blocks_per_segment=4), epoch=1), {})
    now = time.monotonic()
    evict = Evict(Location(Tier.DEVICE, "replica"), ())
    late, early = (QueuedDirective(number, evict, now + after) for number, after in ((1, -0.001), (2, 60.0)))
    clear = QueuedDirective(3, Clear(), math.inf)
    assert [order.number for order in sender.deliver([late, early, clear])] == [2, 3]


def test_a_move_offloads_promotes_and_frees_the_source(
    engine: LiveEngine, directed: Callable[..., ManagedPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is an engine; of the target only the orders are looked at."""
    port, tokens = directed(), prompt(908, TOKENS)
    engine.ask(tokens)
    hashes = engine.hashes(tokens)
    port.ask("api", "clear", ["cpu"], 5.0)
    port.ask("register_replica", "target", 1, NODE, [], EngineFacts(FINGERPRINT))
    moving = threading.Thread(
        target=lambda: answers.append(port.ask("api", "move", Move(0, 1, hashes, keep=False), 10.0))
    )
    answers: list[Any] = []
    moving.start()

    (order,) = port.ask("take_directives", "target", PATIENCE_S)

    assert isinstance(order.directive, Onboard)
    assert 0 < order.deadline_s <= 10.0
    segments = order.directive.plan.segments
    assert [segment[:3] for segment in segments] == [(hashes[4 * n + 3], 4 * n, 4) for n in range(3)]
    assert {segment.key for segment in segments} <= set(port.segments), "the source has offloaded it"
    assert port.ask("api", "stats")["leases"] == 1, "nobody takes it away meanwhile"
    port.ask("acknowledge", order.number, DirectiveResult(Outcome.DONE, 3, 12, 0.001))
    moving.join(patience(PATIENCE_S))
    assert answers == [{"kind": "move", "outcome": "done", "segments": 3, "blocks": 12}]
    assert on_device(engine, tokens) == 0
    assert outcomes(port) == {
        "evict": {"done": 1},
        "move": {"done": 1},
        "offload": {"done": 1},
        "promote": {"done": 1},
    }


def test_a_replica_that_goes_during_a_directive_ends_it_at_once(
    engine: LiveEngine, directed: Callable[..., ManagedPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, tokens = directed(), prompt(909, TOKENS)
    engine.ask(tokens)
    port.ask("register_replica", "mute", 1, NODE, [], EngineFacts(FINGERPRINT))
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(port.ask("api", "direct", "promote", 1, engine.hashes(tokens), 10 * PATIENCE_S))
    )
    asking.start()
    assert port.ask("take_directives", "mute", PATIENCE_S)
    port.manager._replicas["mute"].last_seen -= MISSED_POLLS_S

    port.ask("register_replica", "successor", 1, NODE, [], EngineFacts(FINGERPRINT))

    asking.join(patience(PATIENCE_S))
    assert answers[0]["outcome"] == "lost"
    assert port.ask("api", "stats")["leases"] == 0
    monkeypatch.setattr(direction, "GRACE_S", 0.0)
    assert port.ask("api", "direct", "promote", 1, engine.hashes(tokens), 0.05)["outcome"] == "lost", (
        "nobody answers in time"
    )
    assert port.ask("take_directives", "successor", 1.0) == [], "what is over is not delivered"


def test_a_replica_is_not_sent_more_than_it_can_have_under_way(
    engine: LiveEngine, directed: Callable[..., ManagedPort]
) -> None:
    port = directed()
    port.ask("register_replica", "mute", 1, NODE, [], EngineFacts(FINGERPRINT))
    hashes = engine.hashes(prompt(910, TOKENS))

    async def many() -> list[Any]:
        return await asyncio.gather(*(port.manager.api("direct", "evict", 1, hashes, 0.2) for _ in range(20)))

    answers = asyncio.run_coroutine_threadsafe(many(), port._loop).result(patience(PATIENCE_S))

    found = [answer["outcome"] for answer in answers]
    assert (found.count("lost"), found.count("refused_full")) == (8, 12)
