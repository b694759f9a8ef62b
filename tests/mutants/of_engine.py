"""Faults in `deployments/engine`, the room that touches vLLM. Most tests start an engine."""

from __future__ import annotations

from mutant import Mutant

CONTROL = "deployments/engine/pool/control.py"
SIDE = "deployments/engine/scheduler_side.py"
ENGINE = "deployments/engine/"
PATHS = "deployments/engine/load_paths/"
TESTS = "tests/deployments/engine/"

MUTANTS = (
    Mutant(
        "latents-counted-twice",
        ENGINE + "engine_args.py",
        "halves = 1 if model.use_mla else 2",
        "halves = 2 if model.use_mla else 2",
        (
            TESTS + "test_supported_models.py"
            "::test_latents_are_shared_where_vllm_has_a_prefix_cache_of_them_and_otherwise_refused_in_words",
        ),
        "A pool of latents takes twice the memory that the settings give it.",
    ),
    Mutant(
        "latents-with-another-group",
        ENGINE + "groups.py",
        "if latents and len(windows) > 1:",
        "if latents and len(windows) > 2:",
        (TESTS + "test_supported_models.py::test_latents_with_another_group_are_refused",),
        "Layers are moved by the block table of another group.",
    ),
    Mutant(
        "windows-onboarded-as-one-group",
        CONTROL,
        "blocks = None if self._has_windows else self._take_free",
        "blocks = None if not first < end else self._take_free",
        (TESTS + "pool/test_refused_directives.py",),
        "The KV of all layers is put into the blocks of one group, where a prompt finds it.",
    ),
    Mutant(
        "layers-of-no-group",
        ENGINE + "connector.py",
        "        if self.groups.group_of:\n",
        "        if not self.groups.group_of:\n",
        (TESTS + "test_connector_sides.py::test_a_layer_that_attends_to_another_ones_kv_has_none_to_move",),
        "A replica of a model whose layers share KV does not start.",
    ),
    Mutant(
        "latents-where-vllm-reuses-none",
        ENGINE + "checks.py",
        '    if not cache.enable_prefix_caching:\n        yield (\n            "the model keeps latents',
        '    if not cache:\n        yield (\n            "the model keeps latents',
        (TESTS + "test_supported_models.py::test_a_model_of_another_kind_keeps_vllms_own_prefix_cache",),
        "What vLLM does not trust behind its own cache is loaded, and answers differ from computed ones.",
    ),
    Mutant(
        "serves-log-closed",
        "deployments/engine/engine_args.py",
        '"VLLM_CONFIGURE_LOGGING": "0"',
        '"VLLM_CONFIGURE_LOGGING": "1"',
        (
            "tests/deployments/protocol/test_log_lines.py"
            "::test_vllm_leaves_serves_log_alone_whatever_the_environment_says",
        ),
        "The death of Serve's controller starts every replica again.",
    ),
    Mutant(
        "grammars-of-another-tenant",
        "deployments/engine/grammars/by_tenant.py",
        "        view.backend = self._of(tenant)\n",
        "        view.backend = self._of(tenant[:0])\n",
        (TESTS + "grammars/test_by_tenant.py",),
        "A tenant learns by timing which structured outputs another one has sent.",
    ),
    Mutant(
        "failed-blocks-not-told",
        "deployments/transfer/threads.py",
        "                self._failed_blocks |= failed\n                self._finished.add(job.request_id)\n",
        "                self._finished.add(job.request_id)\n",
        (TESTS + "test_connector_failures.py::test_a_flipped_bit_costs_a_recompute_and_is_reported",),
        "Blocks that a load did not fill are computed with as if it had.",
        may_hang=True,
    ),
    Mutant(
        "failed-plan-tried-again",
        SIDE,
        "            tracked.give_plan_up(arrived // self._block_size)\n",
        "            if tracked.wait.left:\n                tracked.wait.left -= 1\n            else:\n"
        "                tracked.give_plan_up(arrived // self._block_size)\n",
        (TESTS + "test_connector_failures.py::test_a_load_that_fails_wholly_is_not_tried_again",),
        "A request loads one damaged segment again and again.",
    ),
    Mutant(
        "names-of-a-sparse-prefix-kept",
        PATHS + "sparse/path.py",
        "            make_plain(request.request)\n            return None\n",
        "            return None\n",
        (TESTS + "load_paths/sparse/test_sparse_requests.py::test_who_may_not_be_sparse_has_its_plain_names",),
        "Dense KV is stored under the names of a sparse prefix, and presented as one.",
    ),
    Mutant(
        "hidden-blocks-saved-at-a-preemption",
        PATHS + "preempted.py",
        "        if tracked.is_loading or tracked.state:\n",
        "        if tracked.is_loading:\n",
        (TESTS + "load_paths/test_preempted_kv.py",),
        "A preemption saves blocks under names that are not theirs: those of a sparse prefix.",
    ),
    Mutant(
        "window-held-beyond-its-share",
        ENGINE + "held_windows.py",
        "if self.blocks > self._most_blocks < sum(",
        "if self.blocks > self.blocks < sum(",
        (TESTS + "test_held_windows.py",),
        "Requests that run find no free block, because the windows of those before them wait to be saved.",
    ),
    Mutant(
        "windows-kept-nowhere",
        PATHS + "whole.py",
        "boundary_block=end if self._has_windows else 0",
        "boundary_block=0",
        (TESTS + "test_connector_sides.py",),
        "Windows that were loaded are not found on the device, and each next prompt loads them again.",
    ),
    Mutant(
        "preempted-request-holds-again",
        ENGINE + "held_windows.py",
        "        if admitted and self._of(tracked):\n",
        "        if False:\n",
        (TESTS + "test_held_windows.py",),
        "A request is preempted for the blocks that it holds itself, again and again.",
    ),
    Mutant(
        "states-saved-before-their-step-counts",
        ENGINE + "held_states.py",
        "(at for at in held.blocks if at <= end_block and (all_of_them",
        "(at for at in held.blocks if (all_of_them",
        (TESTS + "test_held_states.py",),
        "States are stored that no step has made.",
    ),
    Mutant(
        "failed-load-asked-for-by-each-path",
        PATHS + "whole.py",
        "        if request.wait.was_in_vain:\n",
        "        if False:\n",
        (TESTS + "test_connector_sides.py",),
        "All requests that wait for one damaged segment load it, one after the other.",
    ),
    Mutant(
        "cleared-kv-comes-back",
        CONTROL,
        "arrived if clears == self._clears_of(onboarding) else first",
        "arrived",
        (TESTS + "pool/test_pool_promotions.py::test_clearing_the_device_ends_a_promotion_under_way",),
        "KV that an operator has cleared is on the device again, by a promotion that was under way.",
    ),
    Mutant(
        "fidelity-forgotten",
        "deployments/engine/pool/block_owners.py",
        "        if owner.fidelity != EXACT:\n",
        "        if not owner.fidelity:\n",
        (TESTS + "pool/test_offload_chains.py",),
        "Tolerant KV takes its whole size in Redis.",
    ),
    Mutant(
        "cleared-in-one-piece",
        CONTROL,
        "            if len(blocks) == MOST_BLOCKS:\n",
        "            if len(blocks) == MOST_LOOKED_AT:\n",
        (TESTS + "pool/test_clear_slices.py",),
        "One tenant's clear holds up the streams of all others.",
    ),
    Mutant(
        "damaged-block-promoted",
        CONTROL,
        "while end < arrived and (end == 0 or self._cached(hashes[end - 1])):",
        "while end < first + len(blocks) and (end == 0 or self._cached(hashes[end - 1])):",
        (
            TESTS + "pool/test_pool_promotions.py::"
            "test_a_segment_that_is_not_what_was_stored_never_enters_the_prefix_cache",
        ),
        "Every later request with that prefix is answered from noise.",
    ),
    Mutant(
        "used-block-evicted",
        CONTROL,
        "while (block := self._cached(block_hash)) is not None and block.ref_cnt == 0:",
        "while (block := self._cached(block_hash)) is not None:",
        (TESTS + "pool/test_device_control.py::test_what_a_request_uses_is_not_evicted",),
        "A directive takes blocks out of the cache that a running request still counts on.",
    ),
    Mutant(
        "failed-load-ends-the-request",
        "deployments/engine/checks.py",
        'if transfer is not None and transfer.kv_load_failure_policy != "recompute":',
        "if transfer is not None and not transfer.kv_load_failure_policy:",
        (TESTS + "test_engine_checks.py::test_an_engine_that_would_not_keep_kv_exact_is_not_started",),
        "One damaged segment is a 500 instead of some milliseconds more.",
    ),
    Mutant(
        "stop-string-hides-where-kv-came-from",
        "deployments/engine/resume/front.py",
        "        elif told and finish_reason is not None:\n",
        "        elif not told:\n",
        (
            TESTS
            + "resume/test_continuation.py::test_an_answer_that_a_stop_string_ends_says_where_its_prompt_came_from",
        ),
        "Loads are counted as what the device had.",
    ),
    Mutant(
        "whitespace-without-a-bound",
        "deployments/engine/grammars/by_tenant.py",
        'options = {"max_whitespace_cnt": self.most, **options}',
        "pass",
        ("tests/deployments/engine/grammars/test_whitespace.py",),
        "A model writes line feeds until its tokens are spent, and the answer is no JSON.",
    ),
)
