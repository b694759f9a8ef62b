"""Reuse by the block: a prompt that leaves a stored sequence inside a segment loads that segment's beginning."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from layer_port import forget_device, plain
from live_engine import BLOCK, SEGMENT_BLOCKS, LiveEngine

from kvmanager.moves.plan import Plan
from kvmanager.segments.format import read_header
from kvmanager.segments.spans import NodeKind
from load_tests.harness.engine import prompt
from load_tests.harness.memory_port import BrainPort, MemoryPort
from load_tests.harness.patience import patience
from tests.sizes import LONG

LENGTH = 500  # 15 full blocks: segments of 4, 4, 4 and 3


@dataclass
class Damage:
    """Flips a bit of the segment whose first block is `segment`, somewhere in one of its blocks, in one layer."""

    segment: int
    block: int
    layer: int = 3
    half: int = 1

    def __call__(self, sealed: bytes) -> bytes:
        header = read_header(sealed)
        if header.start_block != self.segment:
            return sealed
        run = (len(sealed) - header.body_offset) // (header.shape[0] * 2 * header.num_blocks)
        changed = bytearray(sealed)
        run_number = (self.layer * 2 + self.half) * header.num_blocks + self.block - self.segment
        changed[header.body_offset + run_number * run + run // 3] ^= 4
        return bytes(changed)


@pytest.fixture
def stored(engine: LiveEngine, request: pytest.FixtureRequest) -> list[int]:
    """A prompt that only the port holds, a different one per test."""
    return stored_at(engine, sum(ord(letter) * (place + 5) for place, letter in enumerate(request.node.name)))


def parted(tokens: list[int], at: int, length: int = LENGTH, seed: int = 77) -> list[int]:
    """A prompt with the first `at` tokens of another."""
    return tokens[:at] + prompt(seed * 1000 + at, length - at)


def starts(port: MemoryPort) -> list[tuple[int, int]]:
    return sorted((span.start_block, span.num_blocks) for span, _ in port.segments.values())


@pytest.mark.parametrize("at", [31, 32, 33, 100, 128, 129, 170, 255, 300, 481])
def test_whatever_leading_blocks_are_stored_are_loaded_down_to_one(
    engine: LiveEngine, stored: list[int], at: int
) -> None:
    tokens = parted(stored, at)
    expected = plain(engine, tokens)
    loaded_before = engine.transfer.counters.bytes_loaded

    answer, by_tier = engine.ask(tokens)

    common = at // BLOCK
    assert (answer, by_tier["cpu"]) == (expected, common * BLOCK)
    assert by_tier["recomputed"] == LENGTH - common * BLOCK
    assert engine.port.bad == []
    read = engine.transfer.counters.bytes_loaded - loaded_before
    payload = common * engine.reuse.copier.block_bytes
    assert payload <= read <= 1.1 * payload, "no more is read than is used, but for heads"


def test_what_a_parted_prompt_stores_begins_where_it_parted(engine: LiveEngine, stored: list[int]) -> None:
    before = dict(engine.port.segments)
    tokens = parted(stored, 6 * BLOCK + 3)
    answer, _ = engine.ask(tokens)
    new = {key: each for key, each in engine.port.segments.items() if key not in before}
    assert sorted((span.start_block, span.num_blocks) for span, _ in new.values()) == [(6, 2), (8, 4), (12, 3)]

    forget_device(engine)
    again, by_tier = engine.ask(tokens)
    assert (again, by_tier["cpu"]) == (answer, 15 * BLOCK)
    forget_device(engine)
    third = parted(tokens, 7 * BLOCK + 1, seed=78)
    expected = plain(engine, third)
    answer, by_tier = engine.ask(third)
    assert (answer, by_tier["cpu"]) == (expected, 7 * BLOCK), "out of two segments that were left inside"


def test_segments_that_overlap_are_taken_from_where_the_one_before_ended(engine: LiveEngine, stored: list[int]) -> None:
    """As two locations may have cut one sequence: [4, 8) holds [4, 6) of the prompt, another one all of [4, 8)."""
    tokens = parted(stored, 6 * BLOCK)
    left = engine.hashes(stored)[4 + SEGMENT_BLOCKS - 1]
    other = engine.port.segments[left]
    engine.port.segments = {key: each for key, each in engine.port.segments.items() if each[0].end_block <= 4}
    answer, _ = engine.ask(tokens)
    forget_device(engine)
    plan = engine.port.plan(engine.hashes(tokens))
    first, second = plan.segments[:2]
    assert (second.start_block, second.num_blocks) == (4, SEGMENT_BLOCKS)
    hashes = engine.hashes(tokens)
    engine.port.segments[left] = other
    part = second._replace(key=left, used_blocks=2, last_hash=hashes[5])
    twice = [first, part, second, *plan.segments[2:]]
    with planned(engine, replace(plan, segments=tuple(twice))):
        again, by_tier = engine.ask(tokens)
    assert (again, by_tier["cpu"]) == (answer, 15 * BLOCK)


@pytest.mark.parametrize("half", [0, 1])
def test_a_damaged_block_that_is_used_is_computed_again_and_reported(
    engine: LiveEngine, stored: list[int], half: int
) -> None:
    tokens = parted(stored, 7 * BLOCK)
    expected = plain(engine, tokens)
    engine.port.spoil = Damage(4, 6, half=half)

    answer, by_tier = engine.ask(tokens)

    assert (answer, by_tier["cpu"]) == (expected, 4 * BLOCK)
    assert engine.port.bad == ["checksum"]


def test_damaged_block_hashes_are_a_mismatch(engine: LiveEngine, stored: list[int]) -> None:
    tokens = parted(stored, 7 * BLOCK)
    expected = plain(engine, tokens)

    def spoil(sealed: bytes) -> bytes:
        changed = bytearray(sealed)
        if read_header(sealed).start_block == 4:
            changed[256 + 32 * 2 + 3] ^= 1
        return bytes(changed)

    engine.port.spoil = spoil
    answer, by_tier = engine.ask(tokens)
    assert (answer, by_tier["cpu"]) == (expected, 4 * BLOCK)
    assert engine.port.bad == ["header"]


@pytest.mark.parametrize("last_hash", [b"", b"x" * 32], ids=["none", "another"])
def test_a_segment_whose_blocks_are_not_the_plans_is_computed_and_counted(
    engine: LiveEngine, stored: list[int], last_hash: bytes
) -> None:
    """The index tells blocks apart by 8 bytes of their hashes; the loader compares all 32."""
    tokens = parted(stored, 7 * BLOCK)
    expected = plain(engine, tokens)
    counted = engine.transfer.counters.mismatches.get("block_hash", 0)
    plan = engine.port.plan(engine.hashes(tokens))
    first, second = plan.segments
    wrong = [first, second._replace(last_hash=last_hash)]
    with planned(engine, replace(plan, segments=tuple(wrong))):
        answer, by_tier = engine.ask(tokens)
    assert (answer, by_tier["cpu"]) == (expected, 4 * BLOCK)
    assert engine.port.bad == ["block_hash"]
    assert engine.transfer.counters.mismatches["block_hash"] == counted + 1


def test_a_promotion_brings_the_blocks_that_are_the_prompts_and_no_others(
    engine: LiveEngine, stored: list[int]
) -> None:
    tokens = parted(stored, 6 * BLOCK + 9)
    expected = plain(engine, tokens)

    done = engine.onboard(tokens).result(patience(60))

    assert (done.outcome, done.blocks) == ("done", 6)
    hashes, old = engine.hashes(tokens), engine.hashes(stored)
    assert set(old[:6]) <= engine.port.on_device
    assert not set(old[6:]) & engine.port.on_device
    assert not set(hashes[6:]) & engine.port.on_device
    answer, by_tier = engine.ask(tokens)
    assert (answer, by_tier["device"], by_tier["cpu"]) == (expected, 6 * BLOCK, 0)


@pytest.mark.parametrize("at", [40, 129, 250, 330])
def test_layer_by_layer_too_only_what_is_used_is_read(layerwise: LiveEngine, at: int) -> None:
    tokens = parted(stored_at(layerwise, 300 + at), at)
    expected = plain(layerwise, tokens)
    loaded_before = layerwise.transfer.counters.bytes_loaded

    answer, by_tier = layerwise.ask(tokens)

    common = at // BLOCK
    assert layerwise.port.layer_fetches == 1
    assert (answer, by_tier["cpu"]) == (expected, common * BLOCK)
    assert layerwise.port.bad == []
    read = layerwise.transfer.counters.bytes_loaded - loaded_before
    payload = common * layerwise.reuse.copier.block_bytes
    assert payload <= read <= 1.1 * payload


def test_layer_by_layer_a_damaged_block_that_is_used_ends_the_load_before_its_segment(layerwise: LiveEngine) -> None:
    tokens = parted(stored_at(layerwise, 290), 7 * BLOCK)
    expected = plain(layerwise, tokens)
    spoil_stored(layerwise.port, Damage(4, 6, layer=5))
    answer, by_tier = layerwise.ask(tokens)
    assert (answer, by_tier["cpu"]) == (expected, 4 * BLOCK)
    assert layerwise.port.bad == ["checksum"]


def test_layer_by_layer_a_segment_whose_blocks_are_not_the_plans_is_computed(layerwise: LiveEngine) -> None:
    tokens = parted(stored_at(layerwise, 291), 7 * BLOCK)
    expected = plain(layerwise, tokens)
    plan = layerwise.port.plan(layerwise.hashes(tokens))
    first, second = plan.segments
    with planned(layerwise, replace(plan, segments=(first, second._replace(last_hash=b"x" * 32)))):
        answer, by_tier = layerwise.ask(tokens)
    assert (answer, by_tier["cpu"]) == (expected, 4 * BLOCK)
    assert layerwise.port.bad == ["block_hash"]


def stored_at(engine: LiveEngine, seed: int) -> list[int]:
    """A prompt that only the port holds."""
    tokens = prompt(seed, LENGTH)
    engine.ask(tokens)
    forget_device(engine)
    return tokens


def spoil_stored(port: MemoryPort, damage: Damage) -> None:
    """Damage what is stored."""
    port.segments = {key: (span, damage(sealed)) for key, (span, sealed) in port.segments.items()}


@pytest.mark.parametrize("port", [MemoryPort, lambda: BrainPort(SEGMENT_BLOCKS)], ids=["naive", "manager"])
def test_prompts_that_part_at_random_places_are_answered_as_if_nothing_were_stored(
    engine: LiveEngine, port: Callable[[], MemoryPort]
) -> None:
    """And each computes no more than its own tokens and one block of what it shares; nothing is stored twice."""
    engine.port = port()
    draw = random.Random(20)
    family = [prompt(9100, 590)]
    engine.ask(family[0])
    forget_device(engine)
    for number in range(24 if LONG else 10):
        base = draw.choice(family)
        at = draw.randrange(1, len(base))
        tokens = parted(base, at, at + draw.randrange(20, 200), seed=9200 + number)
        expected = plain(engine, tokens)
        shared = max(_common(tokens, other) for other in family)
        answer, by_tier = engine.ask(tokens)
        assert answer == expected
        assert by_tier["recomputed"] < len(tokens) - shared + BLOCK
        assert by_tier["cpu"] == shared // BLOCK * BLOCK
        forget_device(engine)
        family.append(tokens)
    assert engine.port.bad == []
    blocks = {block_hash for tokens in family for block_hash in engine.hashes(tokens)}
    answered = sum(span.num_blocks for span, _ in engine.port.segments.values() if span.kind is NodeKind.ANSWER)
    assert sum(span.num_blocks for span, _ in engine.port.segments.values()) - answered <= len(blocks)


def _common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class planned:  # noqa: N801 - a context manager reads like a function
    """Within it the port answers this plan."""

    def __init__(self, engine: LiveEngine, plan: Plan) -> None:
        self._port, self._plan = engine.port, plan

    def __enter__(self) -> None:
        self._port.plan = lambda hashes, used=True: self._plan  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._port.plan
