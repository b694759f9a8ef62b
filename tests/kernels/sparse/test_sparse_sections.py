"""Layers of sparse segments: packed and unpacked with every codec inside, never dense, and total over hostile bytes."""

import numpy as np
import pytest
import torch

from kernels.codecs import CodecError, CodecProfile, make_codec
from kernels.dtypes import DTYPES, array_of
from kernels.sparse.kept_layer import KeptLayer, keep, kept_tokens
from kernels.sparse.section import SparseForm, stated_inner

HEADS, DIM = 2, 8
GENERIC = CodecProfile.generic((2, HEADS, DIM))
FORMS = {
    "raw": SparseForm(),
    "lossless": SparseForm(make_codec("lossless")),
    "cachegen": SparseForm(make_codec("cachegen", 2, GENERIC)),
}
EXACT = ("raw", "lossless")


def dense(tokens, dtype="bfloat16", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return array_of(torch.randn(2, tokens, HEADS, DIM, generator=generator).to(getattr(torch, dtype)))


def kept_of(kv, count, seed=0):
    mass = np.random.default_rng(seed).random((HEADS, kv.shape[1])).astype(np.float16)
    return keep(kv, kept_tokens(mass, count))


def floats(values):
    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize(("tokens", "count"), [(256, 32), (256, 256), (100, 37), (300, 128), (1, 1)])
def test_what_is_packed_comes_back(name, tokens, count):
    kv = dense(tokens)
    kept, form = kept_of(kv, count), FORMS[name]
    section = form.pack(1, kept)
    back = form.unpack(1, section, kv.shape, count, kv.dtype)
    assert back.tokens == tokens
    np.testing.assert_array_equal(back.index, kept.index)
    for mine, theirs in ((back.keys, kept.keys), (back.values, kept.values)):
        assert mine.shape == (count, HEADS, DIM)
        if name in EXACT:
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert np.abs(floats(mine) - floats(theirs)).max() < 1.5
            assert np.abs(floats(mine) - floats(theirs)).mean() < 0.3


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_head_keeps_its_own_tokens(dtype):
    kv = dense(64, dtype)
    kept = kept_of(kv, 16)
    assert kept.index[0].tolist() != kept.index[1].tolist()
    back = FORMS["raw"].unpack(0, FORMS["raw"].pack(0, kept), kv.shape, 16, kv.dtype)
    for head in range(HEADS):
        for row, token in enumerate(kept.index[head]):
            np.testing.assert_array_equal(back.keys[row, head], kv[0, token, head])
            np.testing.assert_array_equal(back.values[row, head], kv[1, token, head])


def test_a_half_of_256_tokens_costs_a_bit_for_each_of_them_beside_its_values():
    kv = dense(256)
    section = FORMS["raw"].pack(0, kept_of(kv, 128))
    assert len(section) == 8 + HEADS * 256 // 8 + kv.nbytes // 2
    assert len(FORMS["raw"].pack(0, kept_of(kv, 256))) == 8 + kv.nbytes


def test_a_sparse_layer_cannot_pass_for_an_array():
    kept = kept_of(dense(64), 64)  # even where every token is kept
    for name in ("shape", "dtype", "ndim", "nbytes", "__getitem__", "__len__", "__buffer__"):
        assert not hasattr(kept, name), name
    with pytest.raises(TypeError, match="not a dense one"):
        np.asarray(kept)
    with pytest.raises((TypeError, RuntimeError)):
        torch.as_tensor(kept)
    with pytest.raises(AttributeError):
        make_codec("lossless").encode(0, kept)
    assert not hasattr(FORMS["raw"], "decode"), "it would be a Codec, and dense readers would take it"


def test_no_codec_is_called_sparse():
    with pytest.raises(ValueError, match="no codec"):
        make_codec("sparse")


@pytest.mark.parametrize("other", ["raw", "lossless", "cachegen"])
@pytest.mark.parametrize("name", list(FORMS))
def test_a_section_coded_otherwise_than_expected_is_refused(name, other):
    kv = dense(64)
    section = FORMS[name].pack(0, kept_of(kv, 32))
    assert stated_inner(section)[0] == name
    if other == name:
        FORMS[other].unpack(0, section, kv.shape, 32, kv.dtype)
        return
    with pytest.raises(CodecError, match="coded as"):
        FORMS[other].unpack(0, section, kv.shape, 32, kv.dtype)


def test_another_number_of_tokens_than_the_budgets_say_is_refused():
    kv = dense(64)
    section = FORMS["raw"].pack(0, kept_of(kv, 32))
    for count in (31, 33, 64):
        with pytest.raises(CodecError, match="tokens are kept"):
            FORMS["raw"].unpack(0, section, kv.shape, count, kv.dtype)


def test_a_head_that_keeps_another_number_than_it_says_is_refused():
    kv = dense(64)
    section = FORMS["raw"].pack(0, kept_of(kv, 32)).copy()
    at = 8 + int(np.flatnonzero(section[8:16] != 0xFF)[0])
    free = next(bit for bit in range(8) if not section[at] >> bit & 1)
    section[at] |= 1 << free
    with pytest.raises(CodecError, match="does not keep"):
        FORMS["raw"].unpack(0, section, kv.shape, 32, kv.dtype)


@pytest.mark.parametrize("index", [[[0, 0], [0, 1]], [[1, 0], [0, 1]], [[0, 4], [0, 1]], [[0, 1]]])
def test_an_index_that_is_none_is_refused(index):
    values = np.zeros((2, HEADS, DIM), np.float32)
    with pytest.raises(ValueError, match="index"):
        KeptLayer(values, values, np.array(index, np.uint16), 4)
    with pytest.raises(ValueError, match="index"):
        keep(np.zeros((2, 4, HEADS, DIM), np.float32), np.array([[0, 4], [0, 1]], np.uint16))


@pytest.mark.parametrize("name", list(FORMS))
def test_mutated_sections_unpack_to_a_layer_or_are_refused(name):
    form, kv = FORMS[name], dense(21)
    random = np.random.default_rng(4)
    good = form.pack(0, kept_of(kv, 8))
    refused = 0
    for _ in range(5_000):
        bad = good.copy()
        kind = random.integers(4)
        if kind == 0:
            bad = bad[: random.integers(len(bad))]
        elif kind == 1:
            bad = random.integers(0, 256, random.integers(600), dtype=np.uint8)
        else:
            for _ in range(1 << random.integers(3)):
                bad[random.integers(min(20, len(bad)) if kind == 2 else len(bad))] ^= 1 << random.integers(8)
        try:
            found = form.unpack(0, bad, kv.shape, 8, kv.dtype)
        except CodecError:
            refused += 1
        else:
            assert found.keys.shape == (8, HEADS, DIM)
            assert found.index.max() < 21
    assert 0 < refused < 5_000
