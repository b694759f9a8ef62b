"""States next to the naive manager: every boundary of a prompt is tried, and plans and look-ups must agree."""

import naive_reach
from naive_copy import EPSILON
from naive_manager import HALF_LIFE, hashes_of

from kvmanager.extensions.states.landings import NO_STATE, STATES, LandingQuery
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import state_name
from kvmanager.segments.spans import NodeKind


def cut(world, location, hashes, boundary, tenant):
    """The states behind the first blocks of a sequence, as a replica offers them; none where they are stored."""
    names = [*hashes[:boundary], state_name(hashes[boundary - 1])]
    spans = world.manager.cut(location, names, boundary, boundary + 1, boundary + 1, tenant)
    assert [span.kind for span in spans] in ([], [NodeKind.STATE])
    return spans


def landings(naive, hashes, keys):
    """The boundaries, in blocks, up to which `keys` have all of a prompt, and the states there."""
    reach = naive_reach.reach(naive, hashes, keys)
    return [end for end in range(1, len(hashes) + 1) if end <= reach and state_name(hashes[end - 1]) in keys]


def last_landing(naive, hashes, keys):
    """The last one that leaves a token to compute; 0: there is none."""
    return max((end for end in landings(naive, hashes, keys) if end < len(hashes)), default=0)


def plan_both(world, prompt, tenant, replica, node, message):
    """Plan for an engine with states, of a prompt whose last message begins at a block; return the real plan."""
    hashes = hashes_of(prompt, tenant)
    query = PlanQuery(hashes, prompt_tokens=len(hashes), extras={STATES: LandingQuery(message, 1)})
    made = world.manager.plan(world.now, replica, node, query)
    _follow(world.naive, world.now, replica, node, hashes, message, made, world.visits.take())
    return made


def loads_of(plan):
    """All that a plan for such an engine brings."""
    found = plan.extras.get(STATES)
    return [*plan.segments, *([found.state] if found is not None and found.state is not None else ())]


def _follow(naive, now, replica, node, hashes, message, plan, visited):
    naive.now = max(naive.now, now)
    naive.requests += 1
    stored, last = naive.stored_anywhere(), len(hashes) - 1
    landing = last_landing(naive, hashes, stored)
    reach = min(naive_reach.reach(naive, hashes, stored), last)
    loads = loads_of(plan)
    assert [load.key for load in loads[len(plan.segments) :]] == ([state_name(hashes[landing - 1])] if landing else [])
    assert (plan.segments[-1].end_block if plan.segments else 0) == landing
    assert _kept(plan) == _worth_keeping(naive, plan, landing, reach, message if 0 < message < last else 0)
    assert (plan.reason == NO_STATE) == (reach > 0 and landing == 0)

    assert len(visited) == len(set(visited))
    own = {key for key in naive.known if naive_reach.part(naive, hashes, key) > naive.known[key].start_block}
    assert {load.key for load in loads} <= set(visited) <= own | {load.key for load in loads}
    for key in visited:
        naive.uses[key] = (naive.decayed(key) + 1, naive.requests)
    for _, told in plan.scores:
        assert any(abs(told - naive.score(key)) < EPSILON for key in visited)
    assert abs(plan.now - naive.requests / HALF_LIFE) < EPSILON

    copies, reached = [], 0
    for load in loads:
        span = naive.known[load.key]
        assert (load.start_block, load.num_blocks) == (span.start_block, span.num_blocks)
        assert load.start_block <= reached < load.end_block
        assert span.kind is NodeKind.STATE or load.end_block <= naive_reach.part(naive, hashes, load.key)
        reached = load.end_block
        places = [place for place in naive.copies if load.key in naive.resident(place)]
        distance = {place: (place.tier is not Tier.CPU, place.holder != node) for place in places}
        assert distance[load.location] == min(distance.values())
        copies.append(naive.copies[load.location][load.key])
        assert load.nbytes == copies[-1].nbytes
    assert (plan.lease_id == 0) == (not copies)
    if copies:
        naive.leases[plan.lease_id] = (naive.now + naive.lease_s, replica, copies)


def _kept(plan):
    found = plan.extras.get(STATES)
    return found.kept_block if found is not None else 0


def _worth_keeping(naive, plan, landing, reach, message):
    """Where states are to be kept: where the prompt is stored without any, else before its last message."""
    if reach > landing:
        return reach
    goes_on = landing and naive.known[plan.segments[-1].key].kind is NodeKind.ANSWER
    return message if message > landing and not goes_on else 0
