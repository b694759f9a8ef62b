from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.loading.loads_under_way import LoadsUnderWay

HERE, THERE = Location(Tier.CPU, "here"), Location(Tier.CPU, "there")


def begun(*loads):
    under_way = LoadsUnderWay()
    for lease_id, (replica, sizes, ahead) in enumerate(loads, start=1):
        under_way.begin(lease_id, replica, sizes, ahead, deadline=10.0 * lease_id)
    return under_way


def test_bytes_are_counted_by_location_until_their_load_ends():
    under_way = begun(("a", {HERE: 10, REDIS: 3}, {}), ("b", {HERE: 5}, {}))
    assert [under_way.nbytes(place) for place in (HERE, THERE, REDIS)] == [15, 0, 3]
    assert [under_way.count(tier) for tier in (Tier.CPU, Tier.REDIS)] == [2, 1]
    under_way.end(1)
    under_way.end(1)
    assert [under_way.nbytes(place) for place in (HERE, REDIS)] == [5, 0]


def test_loads_of_no_bytes_end_as_others_do():
    under_way = begun(("a", {HERE: 0}, {}), ("b", {HERE: 0}, {}))
    for lease_id in (1, 2):
        under_way.end(lease_id)
    assert under_way.nbytes(HERE) == 0


def test_loads_end_with_their_deadline_and_with_their_replica():
    under_way = begun(*[(replica, {REDIS: 1}, {}) for replica in "abab"])
    under_way.expire(9.0)
    assert under_way.nbytes(REDIS) == 4
    under_way.expire(10.0)
    assert under_way.nbytes(REDIS) == 3
    under_way.forget_replica("b")
    assert under_way.nbytes(REDIS) == 1


def test_a_short_load_whose_release_was_lost_is_forgotten_before_a_long_one_that_began_before_it():
    under_way = LoadsUnderWay()
    under_way.begin(1, "a", {REDIS: 100}, {}, 600.0)
    under_way.begin(2, "a", {REDIS: 1}, {}, 2.0, keys=[b"short"])
    under_way.expire(2.0)
    assert under_way.nbytes(REDIS) == 100
    assert not under_way.brings("a", b"short")


def test_a_report_is_of_the_replicas_load_that_is_nearest_in_size():
    under_way = begun(
        ("a", {REDIS: 50}, {Tier.REDIS: 7.0}),
        ("a", {REDIS: 500, HERE: 9}, {Tier.REDIS: 8.0}),
        ("b", {REDIS: 900}, {Tier.REDIS: 9.0}),
    )
    assert under_way.ahead_of("a", Tier.REDIS, 45) == 7.0
    assert under_way.ahead_of("a", Tier.REDIS, 450) == 8.0
    assert under_way.ahead_of("a", Tier.CPU, 9) == 0.0
    assert under_way.ahead_of("b", Tier.CPU, 9) == 0.0
    assert under_way.ahead_of("stranger", Tier.REDIS, 90) == 0.0


def test_a_segment_is_on_its_way_to_a_replica_until_the_load_that_brings_it_there_ends():
    under_way = LoadsUnderWay()
    under_way.begin(1, "a", {HERE: 2}, {}, 10.0, keys=[b"one", b"two"])
    under_way.begin(2, "a", {HERE: 1}, {}, 10.0, keys=[b"two"])
    assert under_way.brings("a", b"one")
    assert not under_way.brings("b", b"one"), "each replica loads for itself"
    under_way.end(1)
    assert [under_way.brings("a", key) for key in (b"one", b"two")] == [False, True]
    under_way.forget_replica("a")
    assert not under_way.brings("a", b"two")
