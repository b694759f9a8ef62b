"""A number that another manager of this server has given means nothing to this one."""

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directive_ledger import DirectiveLedger
from kvmanager.moves.directives import DirectiveKind, Outcome
from kvmanager.moves.leases import Numbers
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import block_hashes

CPU = Location(Tier.CPU, "node")
STORED, SAVED = block_hashes([1], 1, "tests"), block_hashes([2], 1, "tests")


def manager(epoch):
    made = KVManager(ManagerConfig(1), epoch)
    made.set_budget(CPU, 2)
    made.set_budget(REDIS, 2)
    return made


def offered(brain, hashes):
    return brain.offer(0.0, "replica", CPU, brain.cut(CPU, hashes, 0, 1, 1), [1])


def promises(brain):
    """Of each kind the number that it has, once a segment is stored: a lease, a save, a demotion."""
    brain.commit(0.0, CPU, offered(brain, STORED).keys, [1])
    plan = brain.plan(0.0, "replica", "node", PlanQuery(STORED))
    return plan.lease_id, offered(brain, SAVED).save_id, brain.next_demotion(0.0, 1).demotion_id


def test_what_is_given_back_to_a_manager_that_was_started_again_ends_nothing_there():
    before, after = promises(manager(1)), manager(2)
    assert not set(before) & set(promises(after))
    lease_id, save_id, demotion_id = before
    after.release(lease_id)
    after.extend_lease(lease_id, 100.0)
    after.abandon(save_id)
    after.finish_demotion(0.0, demotion_id, dict.fromkeys(STORED, 1))
    stats = after.stats(0.0)
    assert (stats["leases"], stats["reservations"], stats["demotions"]) == (1, 1, 1)
    assert after.commit(0.0, CPU, SAVED, [1]) == SAVED


def test_an_old_acknowledgement_ends_no_new_directive():
    before, after = (DirectiveLedger(2.0, Numbers(epoch)) for epoch in (1, 2))
    order_id, _ = (ledger.begin(0.0, DirectiveKind.EVICT, "replica", 10.0) for ledger in (before, after))
    assert not after.acknowledge(order_id, Outcome.DONE)
    assert len(after) == 1


def test_managers_give_other_numbers_and_never_none():
    given = [numbers.next() for epoch in range(1000) for numbers in [Numbers(epoch)] for _ in range(3)]
    assert len(set(given)) == len(given)
    assert 0 < min(given) <= max(given) < 2**49
