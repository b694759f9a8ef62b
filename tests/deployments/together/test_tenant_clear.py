"""A tenant clears its own blocks of a real engine's device, and nobody else's."""

from __future__ import annotations

import threading

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine

from deployments.engine.pool.block_owners import MOST_CLAIMS, NO_OWNER, BlockOwners, Owner
from kvmanager.segments.keys import EXACT, TOLERANT, tenant_tag
from load_tests.harness.engine import SECRET, prompt
from load_tests.harness.patience import patience

TOKENS = 8 * BLOCK + 8
ALICE, BOB = "alice", "bob"


def cached(engine: LiveEngine, tokens: list[int]) -> int:
    """Leading blocks of a prompt that the device holds."""
    held = set(engine.on_engine_thread(engine.reuse.control.cached_hashes))
    return sum(block in held for block in engine.hashes(tokens))


def test_a_tenants_clear_takes_what_its_requests_brought_prompt_and_answer(engine: LiveEngine) -> None:
    tokens = prompt(900, TOKENS)
    with engine.acting_for(ALICE):
        engine.ask(tokens, max_tokens=BLOCK * 2)
    with engine.acting_for(BOB):
        engine.ask(tokens, max_tokens=2)
    engine.ask(tokens, max_tokens=2)
    with engine.acting_for(ALICE):
        assert engine.clear_device(engine.tenant) == 10
        assert cached(engine, tokens) == 0
        assert engine.clear_device(engine.tenant) == 0
    with engine.acting_for(BOB):
        assert cached(engine, tokens) == 8
    assert cached(engine, tokens) == 8


def test_a_tenants_clear_takes_what_was_loaded_and_what_was_promoted_for_it(engine: LiveEngine) -> None:
    loaded, promoted = prompt(901, TOKENS), prompt(902, TOKENS)
    with engine.acting_for(ALICE):
        engine.ask(loaded)
        engine.ask(promoted)
        engine.clear_device()
        assert engine.ask(loaded)[1]["cpu"] == 8 * BLOCK
        assert engine.onboard(promoted).result(patience(PATIENCE_S)).outcome == "done"
        assert (cached(engine, loaded), cached(engine, promoted)) == (8, 8)
        engine.clear_device(engine.tenant)
        assert (cached(engine, loaded), cached(engine, promoted)) == (0, 0)


def test_a_tenants_clear_ends_its_own_promotions_and_not_those_of_others(engine: LiveEngine) -> None:
    tokens = prompt(903, TOKENS)
    for name in (ALICE, BOB):
        with engine.acting_for(name):
            engine.ask(tokens)
    engine.clear_device()
    opened = threading.Event()
    engine.port.before_fetch = opened.wait
    with engine.acting_for(BOB):
        under_way = engine.onboard(tokens)
    engine.clear_device(tenant_tag(SECRET, ALICE))
    opened.set()
    assert under_way.result(patience(PATIENCE_S)).outcome == "done"


def test_blocks_that_nobody_owns_are_not_remembered_and_those_that_left_are_forgotten() -> None:
    owners = BlockOwners()
    owners.claim(b"root", NO_OWNER)
    owners.stored([b"root", b"next"], None)
    owners.claim(b"alices", Owner("a"))
    owners.stored([b"alices", b"second"], None)
    owners.stored([b"third"], b"second")
    owners.removed(b"second")
    held = [b"root", b"next", b"alices", b"second", b"third"]
    assert [name for name in held if owners.owns("a", name)] == [b"alices", b"third"]
    assert not any(owners.owns("", name) for name in held)


def test_a_block_whose_predecessor_was_cleared_is_looked_up_among_the_running_requests() -> None:
    owners = BlockOwners({b"late": Owner("b", TOLERANT)}.__getitem__)
    owners.claim(b"root", Owner("a"))
    owners.stored([b"late", b"later"], b"gone")
    assert owners.owns("b", b"late")
    assert owners.owns("b", b"later")
    assert owners.owner(b"later") == Owner("b", TOLERANT)


@pytest.mark.parametrize("tenant", ["", "a"])
def test_a_sequence_has_the_fidelity_of_what_brought_it_until_it_leaves(tenant: str) -> None:
    owners = BlockOwners()
    owners.stored([b"before all"], None)
    owners.claim(b"tolerant", Owner(tenant, TOLERANT))
    owners.stored([b"tolerant", b"second"], None)
    owners.stored([b"exact"], None)
    owners.stored([b"third"], b"second")
    owners.stored([b"exact too"], b"exact")
    owners.stored([b"as before"], b"before all")
    held = [b"tolerant", b"second", b"third", b"exact", b"exact too", b"as before"]
    assert [owners.owner(name).fidelity for name in held] == [TOLERANT] * 3 + [EXACT] * 3
    owners.removed(b"third")
    assert owners.owner(b"third") == NO_OWNER


def test_beginnings_that_never_came_are_bounded() -> None:
    owners = BlockOwners()
    for number in range(MOST_CLAIMS + 1):
        owners.claim(number.to_bytes(4, "little"), Owner("a"))
    owners.stored([(0).to_bytes(4, "little")], None)
    owners.stored([(1).to_bytes(4, "little")], None)
    assert [owners.owns("a", number.to_bytes(4, "little")) for number in (0, 1)] == [False, True]
