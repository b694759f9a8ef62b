import hypothesis.strategies as st
from hypothesis import given

from kvmanager.index.score_heap import OUTSIDE, ScoreHeap


class Item:
    def __init__(self):
        self.position = OUTSIDE


steps = st.lists(st.tuples(st.sampled_from(["push", "update", "discard"]), st.integers(0, 15), st.integers(0, 9)))


@given(steps)
def test_lowest_is_the_minimum_after_any_pushes_updates_and_discards(operations):
    items = [Item() for _ in range(16)]
    heap, expected = ScoreHeap(), {}
    for operation, which, score in operations:
        item = items[which]
        if operation == "push" and item not in expected:
            heap.push(item, score)
            expected[item] = score
        elif operation == "update":
            heap.update(item, score)
            expected.update({item: score} if item in expected else {})
        elif operation == "discard":
            heap.discard(item)
            expected.pop(item, None)
        assert len(heap) == len(expected)
        assert {item for item in items if item.position != OUTSIDE} == set(expected)
        lowest = heap.lowest()
        assert (lowest is None) == (not expected)
        assert lowest is None or expected[lowest] == min(expected.values())


@given(st.lists(st.floats(allow_nan=False, allow_subnormal=False), unique=True))
def test_items_come_out_in_order_of_score(scores):
    heap, score_of = ScoreHeap(), {}
    for score in scores:
        item = Item()
        score_of[item] = score
        heap.push(item, score)
    drained = []
    while (item := heap.lowest()) is not None:
        heap.discard(item)
        drained.append(score_of[item])
    assert drained == sorted(scores)
