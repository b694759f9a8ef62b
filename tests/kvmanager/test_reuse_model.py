"""What the model learns of reuse, fed without a manager."""

import pytest

from kvmanager.nodes import Node
from kvmanager.reuse_model import AGES, EDGES, ReuseModel
from kvmanager.segments import NodeKind, SegmentSpan


class Stream:
    """Requests of one segment each."""

    def __init__(self):
        self.model = ReuseModel()
        self.nodes = {}

    def request(self, number):
        self.model.request(1)
        node = self.nodes.get(number)
        if node is not None:
            self.model.used(node)
            self.model.offered(1)
            return node
        node = self.nodes[number] = Node(
            SegmentSpan(number.to_bytes(32, "big"), None, 0, 1, NodeKind.REQUEST), score=0.0
        )
        self.model.offered(1)
        self.model.made(node)
        return node


def test_in_a_loop_a_segment_is_worth_more_the_nearer_its_turn_comes():
    stream = Stream()
    for number in range(50 * 40):
        node = stream.request(number % 50)
    index = stream.model.cohort_of(node).profile.index
    at = max(age for age in range(AGES) if EDGES[age] <= 50)
    assert index[at] > 2 * index[0]
    assert index[0] == pytest.approx(1 / 50, rel=0.5)  # kept for the whole round, which is not due in the next interval


def test_what_is_never_used_again_is_worth_less_than_before_anything_was_learned():
    stream = Stream()
    first = stream.model.cohort_of(stream.request(0)).profile.index[0]
    for number in range(1, 500):
        node = stream.request(number)
    assert stream.model.cohort_of(node).index < first / 4


def test_more_uses_are_worth_more_before_anything_is_learned():
    stream = Stream()
    once = stream.model.cohort_of(stream.request(1)).index
    stream.request(1)
    assert stream.model.cohort_of(stream.request(1)).index > once


def test_a_forgotten_node_does_not_count_as_one_that_was_not_used_again():
    stream = Stream()
    node = stream.request(1)
    cohort = stream.model.cohort_of(node)
    stream.model.forgot(node)
    assert cohort.alive == 0
    assert node.cohort is None


@pytest.mark.parametrize("number", [1, 300])
def test_a_cohort_is_in_the_interval_of_its_age(number):
    stream = Stream()
    cohort = stream.model.cohort_of(stream.request(0))
    for later in range(1, number + 1):
        stream.request(later)
    assert EDGES[cohort.age] <= number < EDGES[cohort.age + 1]
