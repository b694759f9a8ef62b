"""`python -m load_tests.simulator.block_reuse`: leading-block hit rates by the segment and by the block.

Replays a trace's conversations through the manager that serves, with small blocks and a tier that loses nothing, and
also through an index that finds whole segments only, by the hash of their last block. A next turn
(`load_tests.simulator.turn_replay`) begins with all tokens of the prompt before it and of its answer, and what follows
is its own. Other prompts share the blocks of the trace that they share, and no token more. Instead of a trace, the
questions that are asked about one document are replayed: a workload that parts inside segments.

Exit codes: 0 done, 2 a word of the command cannot be used.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.cost import prefix_reach
from kvmanager.segments.keys import HASH_BYTES, BlockHash
from kvmanager.segments.spans import split_segments
from load_tests.simulator.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace
from load_tests.simulator.turn_replay import find_turns

EXIT_INPUT = 2
CPU = Location(Tier.CPU, "node")


class HashedRequest(NamedTuple):
    """A request's full blocks, prompt and answer; the first ``prompt_blocks`` lie wholly in the prompt."""

    hashes: list[BlockHash]
    prompt_blocks: int


class Reuse(NamedTuple):
    """What was found, and what is stored in the end."""

    hit_rate: float
    """Leading blocks found, of all prompts' blocks."""
    stored_blocks: int


def name_blocks(trace: Sequence[TraceRequest], block_tokens: int) -> list[HashedRequest]:
    """Name the blocks of ``block_tokens`` tokens of a trace's requests, in its order.

    ``block_tokens`` divides the trace's own blocks.
    """
    numbers = itertools.count()
    per_trace_block = BLOCK_TOKENS // block_tokens
    named: dict[int, list[BlockHash]] = {}
    """The blocks of a block of the trace."""
    found: list[HashedRequest] = []

    def new(blocks: int) -> list[BlockHash]:
        return [BlockHash(number.to_bytes(HASH_BYTES, "little")) for number in itertools.islice(numbers, blocks)]

    for turn in find_turns(trace):
        request = turn.request
        prompt_blocks = request.input_tokens // block_tokens
        hashes: list[BlockHash] = []
        if turn.previous is not None:
            hashes += found[turn.previous.number].hashes[:prompt_blocks]
        else:
            for block in request.hash_ids[: turn.prompt_blocks]:
                if block not in named:
                    named[block] = new(per_trace_block)
                hashes += named[block]
        hashes += new((request.input_tokens + request.output_tokens) // block_tokens - len(hashes))
        found.append(HashedRequest(hashes, prompt_blocks))
    return found


def ask_questions(questions: int, document_tokens: int, block_tokens: int, rng: random.Random) -> list[HashedRequest]:
    """Return prompts of one document and a question each, of 10 to 120 random tokens, with answers of 64."""
    names = (BlockHash(number.to_bytes(HASH_BYTES, "little")) for number in itertools.count())
    document = list(itertools.islice(names, document_tokens // block_tokens))
    found: list[HashedRequest] = []
    for _ in range(questions):
        prompt_tokens = document_tokens + rng.randint(10, 120)
        own = (prompt_tokens + 64) // block_tokens - len(document)
        found.append(HashedRequest([*document, *itertools.islice(names, own)], prompt_tokens // block_tokens))
    return found


def by_segment(requests: Sequence[HashedRequest], blocks_per_segment: int) -> Reuse:
    """Replay requests over an index of whole segments."""
    ends: set[BlockHash] = set()
    hits = stored = 0
    for hashes, prompt_blocks in requests:
        hits += prefix_reach(hashes[:prompt_blocks], blocks_per_segment, ends.__contains__)
        begin = prefix_reach(hashes, blocks_per_segment, ends.__contains__)
        for span in split_segments(hashes, begin, len(hashes), blocks_per_segment, prompt_blocks):
            stored += span.num_blocks
            ends.add(BlockHash(span.key))
    return Reuse(hits / max(1, sum(request.prompt_blocks for request in requests)), stored)


def by_block(requests: Sequence[HashedRequest], blocks_per_segment: int) -> Reuse:
    """Replay requests over the manager that serves."""
    manager = KVManager(ManagerConfig(blocks_per_segment, max_ghosts=1), epoch=1)
    manager.set_budget(CPU, 1 << 60)
    hits = 0
    for hashes, prompt_blocks in requests:
        plan = manager.plan(0.0, "replica", CPU.holder, PlanQuery(hashes[:prompt_blocks]))
        manager.release(plan.lease_id)
        hits += plan.segments[-1].end_block if plan.segments else 0
        spans = manager.cut(CPU, hashes, 0, len(hashes), prompt_blocks)
        sizes = {span.key: span.num_blocks for span in spans}  # a block is a byte here
        granted = manager.offer(0.0, "replica", CPU, spans, list(sizes.values())).keys
        manager.commit(0.0, CPU, granted, [sizes[key] for key in granted])
    stored = manager.stats(0.0)["locations"][0]["bytes"]
    return Reuse(hits / max(1, sum(request.prompt_blocks for request in requests)), stored)


def main(
    trace: Annotated[str | None, typer.Option(help="A trace in Mooncake's format, JSON lines.")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Instead of a trace: about one document.")] = None,
    document_tokens: Annotated[int, typer.Option(min=1, help="With --questions.")] = 1000,
    block_tokens: Annotated[int, typer.Option(min=1, help=f"Tokens of a block; divides {BLOCK_TOKENS}.")] = 16,
    segment_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a segment at most.")] = 256,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay at most this many requests of the trace.")] = None,
    seed: Annotated[int, typer.Option(help="Of the questions' lengths.")] = 0,
) -> None:
    """Say what share of the prompts' blocks is found by the segment and by the block, and how many are stored."""
    if (trace is None) == (questions is None):
        raise typer.BadParameter("exactly one of --trace and --questions says what is replayed")
    if BLOCK_TOKENS % block_tokens:
        raise typer.BadParameter(f"--block-tokens divides {BLOCK_TOKENS}, got {block_tokens}")
    if segment_tokens % block_tokens:
        raise typer.BadParameter(f"--segment-tokens is a multiple of {block_tokens}, got {segment_tokens}")
    if questions is not None:
        hashed = ask_questions(questions, document_tokens, block_tokens, random.Random(seed))
    else:
        try:
            hashed = name_blocks(read_trace(str(trace), requests), block_tokens)
        except TraceError as error:
            Console(stderr=True).print(str(error), markup=False)
            raise typer.Exit(EXIT_INPUT) from None
    print("| found | leading-block hit rate | blocks stored |\n|---|---:|---:|")
    for how, replay in (("by the segment", by_segment), ("by the block", by_block)):
        hit_rate, stored = replay(hashed, segment_tokens // block_tokens)
        print(f"| {how} | {hit_rate:.4f} | {stored:,} |")
    print(f"| different blocks | | {len({block for request in hashed for block in request.hashes}):,} |")


if __name__ == "__main__":
    typer.run(main)
