"""Faults in `deployments`, outside the engine: stores, transfers, the manager's actor, the router, the tiers."""

from __future__ import annotations

from mutant import Mutant

CHECKED = "deployments/segment_store/checked_store.py"
CODED = "deployments/segment_store/coded_store.py"
CODECS = "deployments/segment_store/segment_codecs.py"
REDIS = "deployments/segment_store/redis_store.py"
COPY = "deployments/transfer/segment_copy.py"
THREADS = "deployments/transfer/threads.py"
SHARED = "deployments/transfer/shared_loads.py"
ROUTER = "deployments/router/prefix_affinity.py"
PLANS = "deployments/replica/prompt_plans.py"
TIER = "deployments/cpu_tier/actor.py"
TESTS = "tests/deployments/"

MUTANTS = (
    Mutant(
        "claim-of-a-living-server-taken",
        "deployments/redis_tier/claim.py",
        "    except (OSError, OverflowError):\n        return False\n    return False\n",
        "    except (OSError, OverflowError):\n        return False\n    return True\n",
        (
            "tests/deployments/segment_store/test_redis_connection.py"
            "::test_the_claim_of_a_process_that_has_ended_is_taken_at_once",
        ),
        "Two servers manage one namespace of a Redis, and evict each other's segments.",
    ),
    Mutant(
        "tier-beyond-its-budget",
        TIER,
        "if self._used_bytes + buffer.nbytes > self._budget_bytes:",
        "if buffer.nbytes > self._budget_bytes:",
        (TESTS + "cpu_tier/test_tier_alone.py::test_what_exceeds_the_budget_is_refused_by_the_tier_itself",),
        "A manager that is mistaken fills the node's memory.",
    ),
    Mutant(
        "kept-without-a-manager",
        TIER,
        "        wanted: list[bytes] = []\n        try:\n",
        "        wanted: list[bytes] = [span.key for span in spans]\n        try:\n",
        (TESTS + "cpu_tier/test_tier_alone.py::test_without_a_manager_nothing_new_is_kept",),
        "A tier holds segments that no index knows: nothing will ever evict them.",
    ),
    Mutant(
        "unverified-segment-let-out",
        CHECKED,
        "            verify(sealed, key=key, fingerprint=self._fingerprint)\n",
        "            read_header(sealed)\n",
        (TESTS + "segment_store/test_redis_store.py", TESTS + "segment_store/test_coded_store.py"),
        "Damage in Redis reaches the CPU tier and is only found by each replica that loads it.",
    ),
    Mutant(
        "another-models-segment-indexed",
        CHECKED,
        "belongs = header.key == entry.key and header.fingerprint == self._fingerprint",
        "belongs = header.key == entry.key",
        (TESTS + "segment_store/test_redis_store.py",),
        "Prompts are planned from segments that every load refuses.",
    ),
    Mutant(
        "decoded-layer-not-compared",
        CODED,
        "if sealer.add() != expected and expected:",
        "if not sealer.add():",
        (TESTS + "segment_store/test_coded_store.py::test_a_lossless_codec_that_decodes_something_else_is_found_out",),
        "A defect of the lossless codec becomes a wrong answer under a right checksum.",
    ),
    Mutant(
        "encoded-without-verifying",
        CODED,
        "yield _array(np.frombuffer(layers.layer(number), np.uint8), layers.header)",
        "yield _arrays(np.frombuffer(layers._view, np.uint8), layers.header)[number]",
        (TESTS + "segment_store/test_coded_store.py",),
        "A damaged segment gets a checksum that is right.",
    ),
    Mutant(
        "lossy-codec-for-exact-prompts",
        CODECS,
        "        if header.fidelity != TOLERANT:\n            name, level = self._coding.exact, 0\n",
        "        if not header.fidelity:\n            name, level = self._coding.exact, 0\n",
        (TESTS + "segment_store/test_coded_store.py",),
        "Exact segments lose bits on their way through Redis.",
    ),
    Mutant(
        "profile-digest-not-compared",
        CODECS,
        "if profile is None or profile.digest != digest:",
        "if profile is None:",
        (TESTS + "segment_store/test_coded_store.py",),
        "Tolerant KV is decoded with another model's means and deviations.",
    ),
    Mutant(
        "parts-of-two-segments",
        REDIS,
        "                if still_there != head:  # deleted or replaced since\n",
        "                if still_there is None:\n",
        (TESTS + "segment_store/test_redis_parts.py",),
        "A segment that is replaced while it is read comes back as a mixture, and is reported as damaged.",
    ),
    Mutant(
        "head-written-before-the-parts",
        REDIS,
        "        for field, value in reversed(fields):\n",
        "        for field, value in fields:\n",
        (TESTS + "segment_store/test_redis_parts.py",),
        "What a dying writer leaves behind is found, and refused by every load.",
    ),
    Mutant(
        "written-without-an-end",
        REDIS,
        "        if self._expire_ms:\n            pipeline.pexpire(name, self._expire_ms)\n        for field",
        "        for field",
        (TESTS + "segment_store/test_redis_store.py::test_segments_expire_when_they_are_told_to",),
        "What a server that is gone has stored stays in Redis for ever.",
    ),
    Mutant(
        "claim-taken-from-its-holder",
        "deployments/redis_tier/claim.py",
        'return None if holder == self._claimant else (holder or b"unknown").decode(errors="replace")',
        'return None if holder else "unknown"',
        (TESTS + "segment_store/test_redis_connection.py::test_a_claim_is_held_by_one_until_it_is_given_up",),
        "Two deployments manage one namespace, and each evicts what the other one has stored.",
    ),
    Mutant(
        "blocks-of-another-prompt",
        COPY,
        "if layers.header.block_hash(used - 1) != (load.last_hash or load.key):",
        "if not layers.header.block_hash(used - 1):",
        (TESTS + "transfer/test_segment_copy.py",),
        "Two prompts whose marks collide are answered from each other's KV.",
    ),
    Mutant(
        "skipped-blocks-written",
        COPY,
        "        first = skip_blocks * layout.block_size\n",
        "        first = 0\n",
        (TESTS + "transfer/test_segment_copy.py",),
        "The beginning of a segment is written where its end belongs.",
    ),
    Mutant(
        "lease-kept-after-a-load",
        THREADS,
        "            self._on_load_end()\n            self._port.release(job.lease_id)\n",
        "            self._on_load_end()\n",
        (TESTS + "transfer/test_kv_transfer.py::test_a_load_releases_its_lease_whether_anything_came_or_not",),
        "What was loaded cannot be evicted until its lease ends by time.",
    ),
    Mutant(
        "load-begun-after-its-time",
        THREADS,
        "            if now < begin_by:\n",
        "            if begin_by:\n",
        (TESTS + "transfer/test_kv_transfer.py::test_a_load_that_does_not_come_to_its_turn_is_given_up",),
        "A request waits for a load that waited for others.",
        may_hang=True,
    ),
    Mutant(
        "held-blocks-not-bounded",
        THREADS,
        "if not goes_alone and self._held_blocks + job.num_blocks > self._max_held_blocks:",
        "if not goes_alone and job.num_blocks > self._max_held_blocks:",
        (TESTS + "transfer/test_kv_transfer.py",),
        "Behind a slow tier saves hold the device's blocks, and requests find none.",
    ),
    Mutant(
        "failed-load-tried-again",
        SHARED,
        "return self.load.failed_at is not None and self.load.failed_at < self.upto",
        "return self.load.failed_at is not None and self.load.failed_at > self.upto",
        (TESTS + "transfer/test_shared_loads.py::test_a_load_has_failed_for_those_who_want_what_did_not_come",),
        "Every request of a burst waits for the same damaged segment.",
    ),
    Mutant(
        "waits-for-little",
        SHARED,
        "return Awaited(load, upto, device_tokens) if 2 * (upto - first) >= len(load.hashes) else None",
        "return Awaited(load, upto, device_tokens)",
        (TESTS + "transfer/test_shared_loads.py::test_nobody_waits_for_a_long_load_of_which_little_is_wanted",),
        "A short prompt waits for the load of a whole document.",
    ),
    Mutant(
        "ordinary-target-for-exact-prompts",
        "deployments/transfer/load_pace.py",
        "if target_s is not None and transfer.get(FIDELITY) == TOLERANT:",
        "if target_s is not None:",
        (TESTS + "transfer/test_load_pace.py",),
        "Loads of exact prompts are given up for a promise that only tolerant ones have.",
    ),
    Mutant(
        "room-given-before-it-is-evicted",
        "deployments/manager/eviction_queue.py",
        "            self._empty.clear()\n            if self._task",
        "            if self._task",
        (TESTS + "manager/test_eviction_queue.py",),
        "A tier is sent segments that it has no room for yet, and refuses them.",
    ),
    Mutant(
        "offer-without-room-not-abandoned",
        "deployments/manager/actor.py",
        "        if not settled:\n            self._brain.abandon(offer.save_id)\n",
        "",
        (TESTS + "manager/test_manager_actor.py",),
        "Room at a slow tier stays promised to saves that will not come.",
    ),
    Mutant(
        "living-replica-forgotten",
        "deployments/manager/replica_seat.py",
        "if name != replica and seat.rank == rank and now - seat.last_seen > MISSED_POLLS_S",
        "if name != replica and seat.rank == rank",
        (TESTS + "manager/test_manager_actor.py::test_two_replicas_that_report_one_rank_do_not_forget_each_other",),
        "While Serve renumbers replicas, living ones lose their leases.",
    ),
    Mutant(
        "late-directive-delivered",
        "deployments/manager/directive_sender.py",
        "            elif until > now:\n",
        "            elif until:\n",
        (TESTS + "manager/test_directive_sender.py::test_what_is_too_late_when_a_replica_polls_is_not_given_to_it",),
        "A replica that was busy evicts what has become hot meanwhile.",
    ),
    Mutant(
        "sent-back-to-the-dead-replica",
        ROUTER,
        "names = [name for name in by_name if name not in request.avoid] or list(by_name)",
        "names = list(by_name)",
        (TESTS + "router/test_router.py::test_a_prompt_that_is_sent_again_avoids_the_replica_that_failed_it",),
        "A retry goes to the replica that has just died, for it looks idle.",
    ),
    Mutant(
        "first-attempt-ends-the-second",
        ROUTER,
        "        if self._state.replica_of(internal_request_id) not in (None, replica_id.unique_id):\n"
        "            return\n",
        "",
        (TESTS + "router/test_router.py::test_the_late_end_of_a_first_attempt_leaves_the_second_ones_load_alone",),
        "The replica that answers a retried prompt looks idle.",
    ),
    Mutant(
        "sparse-kv-for-exact-prompts",
        PLANS,
        "*([self._source.sparse_budgets] if request.fidelity == TOLERANT else ()),",
        "*([self._source.sparse_budgets] if request.fidelity else ()),",
        (TESTS + "replica/test_prompt_plans.py::test_only_a_tolerant_prompt_is_planned_for_sparse_kv",),
        "An exact prompt is answered from KV of which a part was dropped.",
    ),
    Mutant(
        "overlapping-chunks-taken",
        PLANS,
        "fits = end <= chunk.start_token < stop <= len(request.prompt_token_ids)",
        "fits = chunk.start_token < stop <= len(request.prompt_token_ids)",
        (TESTS + "replica/test_blended_plans.py",),
        "A client makes thousands of hashes of one short prompt.",
    ),
    Mutant(
        "secret-readable-by-others",
        "deployments/protocol/secret_file.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)",
        (TESTS + "protocol/test_secret_file.py",),
        "Every account of the machine can forge KV.",
    ),
)
