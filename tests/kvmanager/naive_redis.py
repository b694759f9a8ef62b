"""What the naive manager does between the CPU tiers and Redis: copies to it, and room that they make."""

from itertools import takewhile

from naive_copy import EPSILON, NaiveCopy

from kvmanager.index.locations import REDIS, Tier
from kvmanager.moves.saves import MOST_ABOVE


def above(naive, location, spans):
    """What a promotion of ``spans`` brings along: all that one of them follows on and that only Redis has, or none."""
    here, found, named = naive.copies[location], [], [span.key for span in spans]
    for span in spans:
        there = [*found, *named, *(key for key, copy in here.items() if copy.state != "doomed")]
        lacking = list(takewhile(lambda key: key not in there, naive.ancestors(span.parent)))  # noqa: B023
        comes = all(key in naive.resident(REDIS) and key not in here for key in lacking)
        if comes and len(found) + len(lacking) <= MOST_ABOVE:
            found += lacking
    return found


def next_demotion(naive, now, most_bytes, demotion):
    due = {(location, key) for location, key in naive.expired(now) if location == REDIS}
    if demotion is None:
        return
    naive.due -= due
    victims = [key for order in demotion.evict for key in order.keys]
    assert {order.source for order in demotion.evict} <= {REDIS}
    assert {(REDIS, key) for key in victims[: len(due)]} == due
    victims = victims[len(due) :]
    assert len(demotion.keys) == len(set(demotion.keys)) > 0
    assert len(demotion.keys) == 1 or sum(demotion.nbytes) <= most_bytes
    assert demotion.source.tier is Tier.CPU
    assert set(demotion.keys) <= naive.resident(demotion.source)
    sources = [naive.copies[demotion.source][key] for key in demotion.keys]
    assert [copy.nbytes for copy in sources] == list(demotion.nbytes)
    targets = []
    for key, size in zip(demotion.keys, demotion.nbytes, strict=True):
        span = naive.known[key]
        assert key not in naive.copies[REDIS]
        assert naive.upheld(REDIS, span)
        while naive.room(REDIS, key) < size:
            naive.evict_for(REDIS, span, victims.pop(0))
        targets.append(NaiveCopy(key, size))
        naive.copies[REDIS][key] = targets[-1]
    assert victims == []
    assert demotion.demotion_id not in naive.demotions
    naive.demotions[demotion.demotion_id] = (naive.now + naive.save_s, demotion.source, sources, targets)


def finish_demotion(naive, now, demotion_id, stored):
    naive.expired(now)
    held = naive.copies[REDIS]
    if demotion_id in naive.demotions:
        for copy in naive.demotions[demotion_id][3]:
            size = stored.get(copy.key)
            if size and size <= copy.nbytes and held.get(copy.key) is copy and copy.state == "reserved":
                copy.state, copy.nbytes = "committed", size
        land(naive, demotion_id)
    elif naive.budgets[REDIS]:
        naive.due |= {(REDIS, key) for key in stored if key not in held}


def land(naive, demotion_id):
    _, _, sources, targets = naive.demotions.pop(demotion_id)
    held = naive.copies[REDIS]
    for copy in reversed(targets):
        if held.get(copy.key) is copy and copy.state == "reserved":
            naive.uproot(REDIS, copy.key, bytes_lost=True)
        if copy.key not in held and naive.budgets[REDIS]:
            naive.due.add((REDIS, copy.key))
    naive.unlease(sources)


def relieve(naive, now, directives):
    naive.now = max(naive.now, now)
    at_redis = naive.resident(REDIS)
    for order in directives:
        for key in order.keys:
            if (order.source, key) in naive.due:
                continue
            share = naive.share(order.source, key)
            assert order.source.tier is Tier.CPU
            assert key in at_redis
            assert naive.evicted.popleft() == (order.source, key)
            naive.check_victim(key, naive.leaves(order.source, share))
            assert is_above_its_mark(naive, order.source, share)
            del naive.copies[order.source][key]
            naive.due.add((order.source, key))
    for location in naive.budgets:
        for share in ("", *naive.quotas.get(location.tier, {})) if location.tier is Tier.CPU else ():
            leaves = naive.leaves(location, share)
            if leaves and is_above_its_mark(naive, location, share):
                coldest = min(map(naive.score, leaves)) + EPSILON if naive.coldest_first else float("inf")
                assert any(naive.score(key) <= coldest and key not in at_redis for key in leaves)


def is_above_its_mark(naive, location, share):
    return naive.used_of(location, share) > naive.cpu_high_water * naive.budget_of(location, share)
