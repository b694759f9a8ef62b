import dataclasses
import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.segments.keys import (
    HASH_BYTES,
    ROOT_HASH,
    AdapterName,
    ModelIdentity,
    block_hashes,
    cache_salt,
    tenant_tag,
)
from kvmanager.segments.server_secret import ServerSecret

tokens = st.lists(st.integers(0, 200_000), max_size=40)
words = st.text(max_size=4)
SECRET = ServerSecret(bytes(range(32)))
GOLDEN = "1152806bc8e4e2cd6f0ef8d82b9e2cb3761733b065a74642414bafd2468580e6"
"""A salt as stores of earlier versions have it."""
GOLDEN_FINGERPRINT = "2b1d3b06055cfe361a63d7d318b4b4dfd1731ab439c1cad1aaeb2a736b4c7894"
"""And the fingerprint of `MODEL`."""
fingerprints = st.binary(min_size=1, max_size=4)

MODEL = ModelIdentity(
    weights="sha256:1",
    dtype="bfloat16",
    kv_layout_version=1,
    block_size=32,
    rope="theta=1e4",
    num_layers=2,
    num_kv_heads=1,
    head_dim=64,
)
OTHER = {
    "weights": "sha256:2",
    "dtype": "float16",
    "kv_layout_version": 2,
    "block_size": 64,
    "rope": "theta=1e6",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 128,
    "computation": "another version",
    "lora": "adapter",
    "rank": 1,
    "world_size": 2,
}


@pytest.fixture
def vllm_hashing(monkeypatch):
    kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    hashing = pytest.importorskip("vllm.utils.hashing")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(hashing.sha256_cbor)
    return kv_cache_utils, hashing.sha256_cbor


def test_root_is_vllms_none_hash(vllm_hashing):
    kv_cache_utils, _ = vllm_hashing
    assert kv_cache_utils.NONE_HASH == ROOT_HASH


def test_block_hashes_are_vllms(vllm_hashing):
    kv_cache_utils, sha256_cbor = vllm_hashing
    prompt = [0, 23, 24, 255, 256, 65_535, 65_536, 151_935, *range(1000, 1090)]
    salt = cache_salt(SECRET, MODEL.fingerprint(), "tenant")
    parent, expected = None, []
    for start in range(0, len(prompt) - 15, 16):
        extra = (("cache_salt", salt),) if start == 0 else None
        parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, prompt[start : start + 16], extra)
        expected.append(parent)
    assert len(expected) == 6
    assert block_hashes(prompt, 16, salt) == expected


def test_block_hashes_are_those_of_a_vllm_request(vllm_hashing):
    kv_cache_utils, sha256_cbor = vllm_hashing
    request = pytest.importorskip("vllm.v1.request")
    sampling_params = pytest.importorskip("vllm.sampling_params")
    salt = cache_salt(SECRET, MODEL.fingerprint(), "tenant")
    hasher = kv_cache_utils.get_request_block_hasher(32, sha256_cbor)
    engine_request = request.Request(
        request_id="0",
        prompt_token_ids=list(range(100)),
        sampling_params=sampling_params.SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=hasher,
    )
    assert engine_request.block_hashes == block_hashes(range(100), 32, salt)


def test_block_hashes_of_an_adapter_are_those_of_a_vllm_request(vllm_hashing):
    kv_cache_utils, sha256_cbor = vllm_hashing
    request = pytest.importorskip("vllm.v1.request")
    sampling_params = pytest.importorskip("vllm.sampling_params")
    lora = pytest.importorskip("vllm.lora.request")
    adapter = AdapterName("support", "d" * 64)
    salt = cache_salt(SECRET, MODEL.fingerprint(), "tenant", adapter=adapter)
    engine_request = request.Request(
        request_id="0",
        prompt_token_ids=list(range(100)),
        sampling_params=sampling_params.SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        lora_request=lora.LoRARequest(adapter.name, 1, adapter.digest),
        block_hasher=kv_cache_utils.get_request_block_hasher(32, sha256_cbor),
    )
    assert engine_request.block_hashes == block_hashes(range(100), 32, salt, adapter)


def test_a_salt_without_an_adapter_is_what_it_was_before_there_were_any():
    assert cache_salt(SECRET, bytes(32), "tenant") == GOLDEN


def test_an_adapter_and_each_digest_of_it_have_a_salt_of_their_own():
    adapters = [None, AdapterName("a", "1" * 64), AdapterName("a", "2" * 64)]
    salts = [
        cache_salt(SECRET, bytes(32), "", kind, adapter=adapter)
        for adapter in adapters
        for kind in ("exact", "tolerant")
    ]
    assert len(set(salts)) == len(salts)


@given(tokens, tokens, st.integers(1, 5))
def test_hashes_share_exactly_the_common_full_blocks(left, right, block_size):
    common = 0
    while (common + 1) * block_size <= min(len(left), len(right)) and (
        left[: (common + 1) * block_size] == right[: (common + 1) * block_size]
    ):
        common += 1
    left_hashes, right_hashes = block_hashes(left, block_size, "s"), block_hashes(right, block_size, "s")
    assert len(left_hashes) == len(left) // block_size
    assert left_hashes[:common] == right_hashes[:common]
    assert not set(left_hashes[common:]) & set(right_hashes)


@given(
    st.lists(
        st.tuples(fingerprints, words, st.sampled_from(["exact", "tolerant"]), st.lists(st.integers(0, 3), min_size=1)),
        min_size=2,
        max_size=6,
        unique_by=repr,
    )
)
def test_different_model_tenant_fidelity_or_tokens_never_share_a_key(contexts):
    keys = [
        block_hashes(prompt, 1, cache_salt(SECRET, model, tenant, kind))[-1] for model, tenant, kind, prompt in contexts
    ]
    assert len(set(keys)) == len(keys)


def test_a_model_a_tenant_and_a_fidelity_each_make_a_salt_of_their_own():
    kinds = [
        (model, tenant, *manner)
        for model in (b"m" * 32, b"n" * 32)
        for tenant in ("", "acme", "beta")
        for manner in (("exact",), ("tolerant",), ("blended", "1"), ("blended", "2"))
    ]
    assert len({cache_salt(SECRET, *kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("manner", [("blended",), ("exact", "8"), ("tolerant", "8")])
def test_a_variant_is_a_blended_prompts_and_no_other_ones(manner):
    with pytest.raises(ValueError, match="variant"):
        cache_salt(SECRET, b"m", "acme", *manner)


def test_parts_of_the_salt_do_not_run_together():
    assert cache_salt(SECRET, b"ab", "c") != cache_salt(SECRET, b"a", "bc")
    assert cache_salt(SECRET, b"a", "tenantexact", "") != cache_salt(SECRET, b"a", "tenant", "exact")


def test_without_the_secret_nobody_confirms_a_guessed_prompt_or_name():
    another = ServerSecret(bytes(32))
    for tenant in ("", "acme"):
        salts = {cache_salt(secret, MODEL.fingerprint(), tenant) for secret in (SECRET, another)}
        assert len(salts) == 2
        assert len({block_hashes([1, 2, 3], 1, salt)[0] for salt in salts}) == 2
    assert tenant_tag(SECRET, "acme") != tenant_tag(another, "acme")
    assert cache_salt(SECRET, b"m", "acme") == cache_salt(ServerSecret(bytes(range(32))), b"m", "acme")


def test_the_keys_of_purposes_tell_nothing_of_each_other():
    made = {SECRET.key_for(purpose) for purpose in (b"tag", b"salt", b"redis")}
    assert len(made) == 3
    assert SECRET.key_for(b"tag") == hkdf(bytes(range(32)), b"tag")


def hkdf(secret: bytes, info: bytes) -> bytes:
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(hashes.SHA256(), 32, b"crosskv-server-secret", info).derive(secret)


def test_a_secret_shows_itself_nowhere():
    for shown in (repr(SECRET), str(SECRET), f"{SECRET!r:>20}", repr([SECRET])):
        assert "***" in shown
        assert bytes(range(32)).hex() not in shown
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET != ServerSecret(bytes(32))
    with pytest.raises(ValueError, match="32 bytes, got 31"):
        ServerSecret(bytes(31))


def test_no_tenant_has_the_empty_tag():
    assert tenant_tag(SECRET, "") == ""


def test_a_model_of_plain_attention_has_the_fingerprint_that_earlier_stores_have():
    assert MODEL.fingerprint().hex() == GOLDEN_FINGERPRINT


def test_every_field_of_the_model_is_in_the_fingerprint():
    assert set(OTHER) == {field.name for field in dataclasses.fields(MODEL)}
    prints = {dataclasses.replace(MODEL, **{name: value}).fingerprint() for name, value in OTHER.items()}
    assert len(prints | {MODEL.fingerprint()}) == len(OTHER) + 1
    assert all(len(digest) == HASH_BYTES for digest in prints)


def test_an_empty_salt_is_refused():
    with pytest.raises(ValueError, match="share KV"):
        block_hashes([1, 2], 1, "")


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1, 2], 0, "s")
