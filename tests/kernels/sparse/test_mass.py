"""Attention mass against a masked softmax in torch over all of a sequence's queries."""

import numpy as np
import pytest
import torch

from kernels.dtypes import array_of
from kernels.sparse.mass import attention_mass

TOKENS, QUERY_HEADS, KV_HEADS, DIM = 40, 6, 2, 8
SCALE = DIM**-0.5


def reference(queries, positions, keys, first):
    """A loop over queries: softmax over the keys that each may see."""
    heads = queries.shape[1] // keys.shape[1]
    total, count = torch.zeros(keys.shape[1], len(keys)), torch.zeros(len(keys))
    for query, position in zip(queries, positions, strict=True):
        seen = min(len(keys), max(0, position + 1 - first))
        count[:seen] += 1
        for head in range(queries.shape[1] if seen else 0):
            scores = keys[:seen, head // heads] @ query[head] * SCALE
            total[head // heads, :seen] += scores.softmax(0)
    return total / count.clamp(min=1)


def tensors(seed, queries):
    generator = torch.Generator().manual_seed(seed)
    return (
        2 * torch.randn(queries, QUERY_HEADS, DIM, generator=generator),
        torch.randn(TOKENS, KV_HEADS, DIM, generator=generator),
    )


@pytest.mark.parametrize("first", [0, 64])
@pytest.mark.parametrize("positions", [range(15, 120, 16), range(10), [63, 64, 65, 200]])
def test_the_mass_is_that_of_a_masked_softmax(first, positions):
    positions = np.array(positions)
    queries, keys = tensors(1, len(positions))
    found = attention_mass(array_of(queries), positions, array_of(keys), first, SCALE)
    expected = reference(queries, positions.tolist(), keys, first)
    assert found.shape == (KV_HEADS, TOKENS)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-3, rtol=2e-3)


def test_bfloat16_is_read_as_its_bits():
    queries, keys = (each.bfloat16() for each in tensors(2, 5))
    positions = np.arange(15, 80, 16)
    rounded = attention_mass(array_of(queries), positions, array_of(keys), 0, SCALE)
    exact = attention_mass(array_of(queries.float()), positions, array_of(keys.float()), 0, SCALE)
    np.testing.assert_array_equal(rounded, exact)


def test_a_later_token_is_not_less_for_being_seen_by_fewer():
    """All keys alike: without the division the first token would have by far the most."""
    queries, keys = np.zeros((4, 1, DIM), np.float32), np.zeros((64, 1, DIM), np.float32)
    mass = attention_mass(queries, np.array([15, 31, 47, 63]), keys, 0, SCALE)[0]
    assert mass[63] == pytest.approx(1 / 64, rel=1e-2)  # seen by one query, among 64 keys
    assert mass[0] == pytest.approx((1 / 16 + 1 / 32 + 1 / 48 + 1 / 64) / 4, rel=1e-2)


def test_keys_that_no_query_sees_have_none():
    queries, keys = tensors(3, 2)
    mass = attention_mass(array_of(queries), np.array([3, 5]), array_of(keys), 0, SCALE)
    assert (mass[:, :6] > 0).all()
    assert (mass[:, 6:] == 0).all()
    assert (attention_mass(array_of(queries), np.array([3, 5]), array_of(keys), 64, SCALE) == 0).all()


def test_shapes_of_two_models_are_refused():
    queries, keys = (array_of(each) for each in tensors(4, 3))
    for wrong in (queries[..., :4], queries[:, :5], queries[0]):
        with pytest.raises(ValueError, match="not of one model"):
            attention_mass(wrong, np.arange(3), keys, 0, SCALE)
    with pytest.raises(ValueError, match="positions"):
        attention_mass(queries, np.arange(4), keys, 0, SCALE)
