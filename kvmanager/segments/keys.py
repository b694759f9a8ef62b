"""Block hashes, segment keys and the salt: one identity for a prefix, everywhere.

The hash of a block is vLLM's own (``prefix_caching_hash_algo="sha256_cbor"``, vllm/v1/core/kv_cache_utils.py), so that
the ingress, the manager, every tier and the engine's prefix cache name the same tokens by the same 32 bytes. All that
decides a KV value besides the tokens is folded into the *salt*: model, LoRA adapter, tenant, fidelity and its variant.
The salt enters the first block and through the chain of hashes every later one. Equal key, equal KV; nothing else has
to be compared.

Salts and tags are keyed with the server's secret, that of no tenant too: an observer of a key, a tag or the fingerprint
cannot find out by trying which prompt or which name it stands for.

Needs ``PYTHONHASHSEED`` unset in the engine's process: vLLM derives the root of the chain from it when it is set.
Pure functions: any thread.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final, Literal, NamedTuple, NewType, TypeAlias

import cbor2

from kvmanager.segments.server_secret import ServerSecret

BlockHash = NewType("BlockHash", bytes)
"""Hash (32 bytes) of a full block's tokens and of everything before them."""

SegmentKey = NewType("SegmentKey", bytes)
"""Name of a segment: the hash of its last block."""

Fidelity: TypeAlias = Literal["exact", "tolerant", "blended"]
"""How a prompt's KV may differ from what its model computes. Each has names of its own, and may read exact KV."""
EXACT: Final = "exact"
"""Not at all: it is bit by bit the same."""
TOLERANT: Final = "tolerant"
"""It may have been stored with loss."""
BLENDED: Final = "blended"
"""Chunks of it may have been computed where other tokens stood before them, and only a part of it recomputed
(CacheBlend, arXiv 2405.16444)."""
FIDELITIES: Final = {EXACT: 0, TOLERANT: 1, BLENDED: 2}
"""Their codes in the header of a segment (`kvmanager.segments.head`)."""

HASH_BYTES = 32
TENANT_BYTES = 8


def _sha256_cbor(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


ROOT_HASH = BlockHash(_sha256_cbor("vllm-none-hash"))
"""Parent of every first block; vLLM's ``NONE_HASH`` for its default seed."""


class AdapterName(NamedTuple):
    """A LoRA adapter as vLLM's hashes name it: in every block's extra keys, with the path that its request gives.

    The path that we give is the digest of the adapter's files. So other weights under the same name have other hashes.
    """

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """All that KV values depend on besides tokens. Two engines may share KV only if every field is equal."""

    weights: str
    """Identity of the weights: a revision or a digest of the checkpoint, not its display name."""
    dtype: str
    """Element type of the KV cache, e.g. ``bfloat16``."""
    kv_layout_version: int
    """Version of the canonical segment layout that the kernels write."""
    block_size: int
    """Tokens per block."""
    rope: str
    """Canonical text of the rotary-embedding parameters (base, scaling, and the length where that switches them)."""
    num_layers: int
    num_kv_heads: int
    """KV heads that one rank holds."""
    head_dim: int
    computation: str = ""
    """Canonical text of what computes: versions, backend, eager or compiled, quantization, engine arguments."""
    lora: str = ""
    """Identity of the LoRA adapter, empty for none."""
    rank: int = 0
    """Parallel rank whose shard the KV belongs to."""
    world_size: int = 1
    """Ranks the model is split over: rank 1 of 2 and rank 1 of 4 hold different heads."""

    def fingerprint(self) -> bytes:
        """Return the 32-byte digest that stored segments carry and the salt contains."""
        return _sha256_cbor(("crosskv-model", astuple(self)))


def cache_salt(
    secret: ServerSecret,
    fingerprint: bytes,
    tenant: str,
    fidelity: Fidelity = EXACT,
    variant: str = "",
    adapter: AdapterName | None = None,
) -> str:
    """Return the salt (64 hex characters) that separates servers, models, tenants and fidelities in every key.

    ``variant``: of a blended prompt, and of no other one, how it is blended. ``adapter``: of a prompt that a LoRA
    adapter answers; without one the salts are those of servers that know no adapters. Each part is hashed with its
    length before it, so that no two of them run together into one. Raises ValueError for a blended prompt without a
    variant, and for a variant of another one.
    """
    if (fidelity == BLENDED) != bool(variant):
        raise ValueError(f"a variant belongs to blended prompts, got {variant!r} for {fidelity}")
    manner = f"{fidelity} {variant}" if variant else fidelity
    digest = hmac.new(secret.key_for(b"salt"), digestmod=hashlib.sha256)
    parts = [fingerprint, tenant.encode(), manner.encode()]
    if adapter is not None:
        parts.append(adapter.digest.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def tenant_tag(secret: ServerSecret, tenant: str) -> str:
    """Return the name (16 hex characters) that a tenant has in the index, in stored segments, quotas and metrics.

    For accounting only, so 8 bytes are enough: what keeps tenants apart is the salt. Only a holder of the secret can
    tell the name of a tag, or find it by trying names. No tenant ("") has the empty tag.
    """
    if not tenant:
        return ""
    return hmac.digest(secret.key_for(b"tag"), tenant.encode(), "sha256").hex()[: 2 * TENANT_BYTES]


def state_name(block_hash: BlockHash) -> BlockHash:
    """Return what names a model's states behind a block, where it has any: as unique as the name of the block."""
    return BlockHash(hashlib.sha256(b"crosskv-state" + block_hash).digest())


def block_hashes(
    token_ids: Sequence[int], block_size: int, salt: str, adapter: AdapterName | None = None
) -> list[BlockHash]:
    """Return the hash of each full block of ``token_ids``; the tokens of a last, partial block have none.

    ``adapter``: the one that the salt was made with; vLLM names it in every block. O(len(token_ids)). Raises ValueError
    for a block size below 1 and for an empty salt, which would share KV between tenants.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, got {block_size}")
    if not salt:
        raise ValueError("an empty salt would let tenants and models share KV: pass cache_salt(...)")
    hashes: list[BlockHash] = []
    parent: bytes = ROOT_HASH
    of_adapter = (("lora", *adapter),) if adapter else ()
    extra_keys: tuple[tuple[str, ...], ...] | None = (*of_adapter, ("cache_salt", salt))
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = _sha256_cbor((parent, tuple(token_ids[start : start + block_size]), extra_keys))
        hashes.append(BlockHash(parent))
        extra_keys = of_adapter or None
    return hashes
