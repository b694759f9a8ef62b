"""Faults in `kernels`: tensors that come out a little wrong."""

from __future__ import annotations

from mutant import Mutant

ROPE = "kernels/rope/shift.py"
MOVES = "kernels/paged/gather_scatter.py"
SECTION = "kernels/sparse/section.py"
TESTS = "tests/kernels/"

MUTANTS = (
    Mutant(
        "keys-and-values-swapped",
        "kernels/paged/index.py",
        "        k, v = segment.to(cache.device)\n",
        "        v, k = segment.to(cache.device)\n",
        (TESTS + "test_paged.py",),
        "On a GPU without Triton every loaded block is noise.",
    ),
    Mutant(
        "block-after-the-last-one",
        MOVES,
        "if first < 0 or last >= layer.shape[0]:",
        "if first < 0 or last > layer.shape[0]:",
        (TESTS + "test_paged.py",),
        "A copy writes behind the cache: the engine's process ends, or worse, does not.",
    ),
    Mutant(
        "block-named-twice",
        MOVES,
        "if len(set(block_ids)) != len(block_ids):",
        "if len(block_ids) < 1:",
        (TESTS + "test_paged.py",),
        "Two parts of a prompt are written over each other.",
    ),
    Mutant(
        "block-size-of-the-backend-not-asked",
        "kernels/paged/layout.py",
        "if self.block_size < 1 or self.block_size % tile:",
        "if self.block_size < 1:",
        (TESTS + "test_layout.py",),
        "A cache that the backend lays out in tiles is read as if it were not.",
    ),
    Mutant(
        "bytes-behind-a-section",
        "kernels/codecs/base.py",
        "        if len(self._left):\n            raise CodecError(",
        "        if len(self._left) > 1 << 40:\n            raise CodecError(",
        (TESTS + "test_codecs_fuzz.py::test_a_byte_behind_a_section_is_refused",),
        "A section that was cut from two others decodes to KV of neither.",
    ),
    Mutant(
        "rope-shift-off-by-one",
        ROPE,
        "angles = distinct.double().unsqueeze(1) * inv_freq.double()",
        "angles = (distinct + 1).double().unsqueeze(1) * inv_freq.double()",
        (TESTS + "test_rope.py",),
        "A chunk's keys are turned one token too far, and blended answers get worse unseen.",
    ),
    Mutant(
        "rope-angles-in-single-precision",
        ROPE,
        "angles = distinct.double().unsqueeze(1) * inv_freq.double()",
        "angles = distinct.float().unsqueeze(1) * inv_freq",
        (TESTS + "test_rope.py",),
        "Far behind in a long prompt a chunk's keys are turned wrongly.",
    ),
    Mutant(
        "row-does-not-see-itself",
        "kernels/blend/rows.py",
        "lengths = positions[ends - 1] + 1",
        "lengths = positions[ends - 1]",
        (TESTS + "blend/test_rows.py",),
        "A token that is computed for a blend does not attend to itself.",
    ),
    Mutant(
        "no-number-is-no-change",
        "kernels/blend/rows.py",
        "nan_to_num(nan=torch.inf, posinf=torch.inf)",
        "nan_to_num(nan=0.0, posinf=torch.inf)",
        (TESTS + "blend/test_rows.py",),
        "Rows whose stored KV is no number are reused.",
    ),
    Mutant(
        "recent-tokens-dropped",
        "kernels/sparse/kept_layer.py",
        "    older = tokens - recent\n",
        "    older, recent = tokens, 0\n",
        (TESTS + "sparse/test_choice.py",),
        "A sparse prefix forgets the tokens just before the question.",
    ),
    Mutant(
        "stated-tokens-not-compared",
        SECTION,
        "        if stated != kept:\n",
        "        if stated < 0:\n",
        (TESTS + "sparse/test_sparse_sections.py",),
        "A section that keeps other tokens than its budget says is read as if it did not.",
    ),
    Mutant(
        "unequal-heads-taken",
        SECTION,
        "if marks[:, tokens:].any() or (marks.sum(1, dtype=np.int64) != kept).any():",
        "if marks[:, tokens:].any() or marks.sum(dtype=np.int64) != kept * heads:",
        (TESTS + "sparse/test_sparse_sections.py",),
        "One head gets the tokens of another one.",
    ),
    Mutant(
        "query-does-not-see-its-own-key",
        "kernels/sparse/mass.py",
        "sees = query_positions[:, None] >= of_key[None]  # (n, tokens)",
        "sees = query_positions[:, None] > of_key[None]  # (n, tokens)",
        (TESTS + "sparse/test_mass.py",),
        "Which tokens are kept is decided by a wrong mask.",
    ),
)
