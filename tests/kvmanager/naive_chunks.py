"""Plans of blended prompts beside the naive manager: what must be found of each chunk, and what is then leased."""

from dataclasses import replace

import naive_reach
from naive_manager import hashes_of

from kvmanager.extensions.blend.chunks import BLEND, BlendQuery, BlendTerms, ChunkQuery
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanQuery, PlanReason


def queries(prompt, tenant, chunks):
    """Chunks of a prompt of one-token blocks, by (gap before it, tokens) of each, as far as the prompt goes."""
    made, at = [], 0
    for gap, tokens in chunks:
        at += gap
        ids = prompt[at : at + tokens]
        if ids:
            made.append(ChunkQuery(at, len(ids), hashes_of(ids, tenant)))
        at += tokens
    return made


def plan_both(world, prompt, tenant, device, replica, node, chunks):
    """Plan with both managers of a world; return the real one's plan."""
    hashes = hashes_of(prompt, tenant)
    device, wanted = min(device, len(hashes)), queries(prompt, tenant, chunks)
    blend = BlendQuery(wanted, 0.25, BlendTerms(1, 4))
    query = PlanQuery(hashes, device_blocks=device, extras={BLEND: blend})
    made = world.manager.plan(world.now, replica, node, query)
    plan(world.naive, world.now, replica, node, hashes, device, wanted, made, world.visits.take()[::-1])
    return made


def plan(naive, now, replica, node, hashes, device_blocks, chunks, plan, visited):
    """``visited``: the keys whose use the real one counted, in its order: the deepest of each chain first."""
    own = list(visited[: len(plan.scores)])[::-1]
    naive.now = max(naive.now, now)
    stored = naive.stored_anywhere()
    own_reach = naive_reach.reach(naive, hashes, stored)
    prefix = max(device_blocks, own_reach)
    expected = []
    for chunk in chunks:
        blocks = naive_reach.reach(naive, chunk.hashes, stored)
        if blocks and chunk.start_token + blocks > prefix:
            expected.append((chunk.start_token, blocks))
    assert [(chunk.start_token, chunk.blocks) for chunk in chunks_of(plan)] == expected
    # The plan's own part, as of a prompt without chunks.
    own_lease = plan.lease_id if plan.segments else 0
    reason = plan.reason if not chunks_of(plan) else PlanReason.HIT
    naive.plan(now, replica, node, hashes, device_blocks, replace(plan, lease_id=own_lease, reason=reason), own)
    # What the chunks found was used too, each segment once in all.
    rest = visited[len(plan.scores) :]
    known = {key for chunk in chunks if chunk.start_token + chunk.tokens > prefix for key in _known(naive, chunk)}
    assert len(set(visited)) == len(visited)
    assert set(rest) <= known
    for key in rest:
        naive.uses[key] = (naive.decayed(key) + 1, naive.requests)
    copies = []
    for chunk in chunks_of(plan):
        of_chunk = next(one.hashes for one in chunks if one.start_token == chunk.start_token)
        reached = 0
        for segment in chunk.loads:
            span = naive.known[segment.key]
            assert (segment.start_block, segment.num_blocks) == (span.start_block, span.num_blocks)
            assert segment.start_block <= reached < segment.end_block
            assert segment.end_block == naive_reach.part(naive, of_chunk, segment.key)
            reached = segment.end_block
            places = [place for place in naive.copies if segment.key in naive.resident(place)]
            distance = {place: (place.tier is not Tier.CPU, place.holder != node) for place in places}
            assert distance[segment.location] == min(distance.values())
            copies.append(naive.copies[segment.location][segment.key])
            assert segment.key in visited
    if copies:
        assert plan.lease_id
        end, owner, held = naive.leases.get(plan.lease_id, (naive.now + naive.lease_s, replica, []))
        naive.leases[plan.lease_id] = (end, owner, [*held, *copies])
    assert (plan.lease_id == 0) == (not plan.segments and not chunks_of(plan))


def chunks_of(plan):
    """What a plan blends."""
    return plan.extras[BLEND].chunks if BLEND in plan.extras else ()


def _known(naive, chunk):
    return [key for key in naive.known if naive_reach.part(naive, chunk.hashes, key) > naive.known[key].start_block]
