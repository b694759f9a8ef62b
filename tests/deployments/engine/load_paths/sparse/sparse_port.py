"""A `KVPort` in memory that also has sparse segments, in a form of its own: what an engine stored, thinned at random.

A sparse segment here is ``digest (32), layers u32, kept tokens of each layer u32, then K and V of each layer``.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from deployments.protocol.engine_hints import EngineHints
from kernels.paged.layout import PagedLayout
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, PlannedSparse, sparse_salt
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import Plan, PlannedLoad
from kvmanager.segments.format import read_header
from kvmanager.segments.keys import TOLERANT
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch
from load_tests.harness.memory_port import MemoryPort

DIGEST_BYTES = 32


@dataclass(frozen=True)
class Thinned:
    """A prompt's prefix as it was made sparse. `kept[layer][head]`: the tokens that are kept, ascending."""

    plan: Plan
    blocks: int
    kept: list[list[list[int]]]

    def salt(self, plain_salt: str) -> str:
        """The salt of prompts that begin with it."""
        return sparse_salt(plain_salt, self.sparse.loads[-1].key, self.sparse.digest)

    @property
    def sparse(self) -> PlannedSparse:
        """The plan's prefix."""
        found: PlannedSparse = self.plan.extras[SPARSE]
        return found

    def hints(self, plain_salt: str) -> EngineHints:
        """What their requests tell the engine."""
        return EngineHints(self.plan, plain_salt=plain_salt, fidelity=TOLERANT)


class SparsePort(MemoryPort):
    """See the module's docstring. `layout` is the engine's."""

    def __init__(self, layout: PagedLayout) -> None:
        super().__init__()
        self._layout = layout
        self.sparse: dict[bytes, bytes] = {}
        self.sparse_fetches = 0

    def thin(self, hashes: Sequence[bytes], blocks: Sequence[Sequence[int]], seed: int = 0) -> Thinned:
        """Make a prompt's leading segments sparse, which are stored raw: `blocks[i][l]` of segment i in layer l.

        Each KV head keeps tokens of its own, drawn from `seed`.
        """
        draw = random.Random(seed)
        plan = self.plan(hashes)
        loads: list[PlannedLoad] = []
        kept: list[list[list[int]]] = [[[] for _ in range(self._layout.num_kv_heads)] for _ in blocks[0]]
        for segment, counts in zip(plan.segments, blocks, strict=False):
            dense = self._dense(segment.key, len(counts))
            tokens, first = dense.shape[2], segment.start_block * self._layout.block_size
            parts = []
            for layer, count in enumerate(counts):
                chosen = [
                    sorted(draw.sample(range(tokens), count * self._layout.block_size))
                    for _ in range(self._layout.num_kv_heads)
                ]
                heads = [dense[layer, :, rows, head] for head, rows in enumerate(chosen)]
                parts.append(torch.stack(heads, dim=2))  # (k|v, kept, kv_heads, head_dim)
                for head, rows in enumerate(chosen):
                    kept[layer][head] += [first + row for row in rows]
            self.sparse[segment.key] = _packed(parts)
            place = segment._replace(tier=Tier.REDIS, nbytes=len(self.sparse[segment.key]), raw_nbytes=0)
            loads.append(place._replace(used_blocks=0, last_hash=b""))
        counts_of_loads = [list(counts) for counts in blocks[: len(loads)]]
        digest = hashlib.sha256(repr((counts_of_loads, seed)).encode()).digest()
        kept_of_loads = tuple(map(tuple, counts_of_loads))
        sparse = PlannedSparse(tuple(loads), kept_of_loads, (digest,) * len(loads), digest)
        return Thinned(replace(plan, segments=(), extras={SPARSE: sparse}), sparse.blocks, kept)

    def open_kept(
        self, sealed: memoryview, load: PlannedLoad, form: bytes = b""
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `deployments.engine.load_paths.sparse.requests.OpenKept`."""
        body = bytes(sealed[DIGEST_BYTES:])
        if hashlib.sha256(body).digest() != bytes(sealed[:DIGEST_BYTES]):
            raise SegmentMismatch(MismatchReason.CHECKSUM)
        (layers,) = struct.unpack_from("<I", body)
        counts = struct.unpack_from(f"<{layers}I", body, 4)
        values = torch.frombuffer(bytearray(body[4 + 4 * layers :]), dtype=self._layout.dtype)
        each = self._layout.num_kv_heads * self._layout.head_dim
        found = []
        for count in counts:
            part, values = values[: 2 * count * each], values[2 * count * each :]
            keys, vals = part.view(2, count, self._layout.num_kv_heads, self._layout.head_dim)
            found.append((keys, vals))
        return found

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """See `KVPort`. What lies in Redis here is sparse."""
        if not any(load.tier == Tier.REDIS.value for load in loads):
            yield from super().fetch(loads, deadline)
            return
        self.sparse_fetches += 1
        self.last_deadline = deadline
        self.before_fetch()
        for load in loads:
            found = self.spoil(self.sparse[load.key]) if load.key in self.sparse else None
            yield memoryview(found) if found is not None else None

    def _dense(self, key: bytes, layers: int) -> torch.Tensor:
        sealed = self.segments[key][1]
        header = read_header(sealed)
        shape = self._layout.segment_shape(layers, header.num_blocks)
        body = bytearray(sealed[header.body_offset :])
        return torch.frombuffer(body, dtype=self._layout.dtype)[: torch.Size(shape).numel()].view(shape)


def _packed(parts: Sequence[torch.Tensor]) -> bytes:
    counts = struct.pack(f"<{len(parts) + 1}I", len(parts), *(part.shape[1] for part in parts))
    body = counts + b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return hashlib.sha256(body).digest() + body
