import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.extensions.sparse.retained_prefixes import sparse_salt
from kvmanager.segments.keys import block_hashes, cache_salt
from kvmanager.segments.server_secret import ServerSecret

SECRET = ServerSecret(bytes(range(32)))


@given(
    st.lists(
        st.tuples(st.sampled_from(["s", "sk"]), st.binary(max_size=3), st.binary(max_size=3)),
        min_size=2,
        max_size=6,
        unique=True,
    )
)
def test_each_sparse_prefix_has_names_of_its_own(prefixes):
    salts = [sparse_salt(*prefix) for prefix in prefixes]
    assert len(set(salts)) == len(salts)
    assert not set(salts) & {salt for salt, _, _ in prefixes}


def test_who_shares_half_of_a_sparse_prefix_shares_none_of_its_blocks():
    salt = cache_salt(SECRET, b"model", "tenant", "tolerant")
    prompt = list(range(64))
    whole, half = block_hashes(prompt, 16, salt), block_hashes(prompt[:32], 16, salt)
    of_whole = block_hashes(prompt, 16, sparse_salt(salt, whole[-1], b"budgets"))
    of_half = block_hashes(prompt, 16, sparse_salt(salt, half[-1], b"budgets"))
    assert len({*whole, *of_whole, *of_half}) == 3 * 4


def test_a_sparse_prefix_is_a_tenants_own_and_needs_a_salt():
    mine, other = (cache_salt(SECRET, b"model", tenant, "tolerant") for tenant in ("a", "b"))
    assert sparse_salt(mine, b"key", b"kept") != sparse_salt(other, b"key", b"kept")
    with pytest.raises(ValueError, match="empty salt"):
        sparse_salt("", b"key", b"kept")
