"""Faults in `app`: who may do what, how much of it, and what becomes of a request whose replica dies."""

from __future__ import annotations

from mutant import Mutant

AUTH = "app/gate/auth.py"
RETRIES = "app/openai/retries.py"
SUSPECTS = "app/openai/suspects.py"
KEYS = "app/openai/prompt_keys.py"
TURNS = "app/answers/turns.py"
API = "app/control/api.py"
TESTS = "tests/app/"

MUTANTS = (
    Mutant(
        "third-engine-for-one-prompt",
        RETRIES,
        "if retries >= self._most_retries or self._engines_ended > 1 or self._replicas.none_left():",
        "if retries >= self._most_retries or self._replicas.none_left():",
        (
            TESTS + "continuation/test_migration.py::"
            "test_a_prompt_that_kills_engines_beside_others_late_in_its_answer_ends_no_third_one",
        ),
        "One prompt ends every replica, one after the other.",
    ),
    Mutant(
        "pinned-prompt-moved",
        "app/continuation/answered.py",
        "        if request.replica_pin is not None:\n",
        "        if request.replica_pin is not None and self.began:\n",
        (TESTS + "openai/test_retry.py::test_a_pinned_prompt_is_not_moved",),
        "A client that asked for one replica is answered by another.",
    ),
    Mutant(
        "tenant-clears-all",
        API,
        "        whose = None if caller.admin else keys.tag(caller.tenant)\n",
        "        whose = None\n",
        (TESTS + "control/test_tenants.py::test_a_tenants_clear_is_of_its_own_kv_and_an_administrators_of_all",),
        "Any tenant empties the cache of all.",
    ),
    Mutant(
        "tenant-sees-all-figures",
        API,
        "        if caller.admin:\n            return await ask(control.stats())\n",
        "        if caller.tenant or caller.admin:\n            return await ask(control.stats())\n",
        (TESTS + "control/test_tenants.py::test_a_tenants_statistics_are_its_own_and_an_administrators_of_all",),
        "A tenant sees what others store.",
    ),
    Mutant(
        "node-of-another-tenant-pinned",
        "app/control/moves.py",
        "        return None if caller.admin else keys.tag(caller.tenant)\n",
        "        return None if caller else keys.tag(caller.tenant)\n",
        (
            TESTS + "control/test_kv_moves.py::"
            "test_a_node_is_moved_and_brought_by_its_name_for_its_owner_or_an_administrator",
            TESTS + "control/test_orders.py::test_a_node_stands_for_a_prompt_and_is_looked_for_among_the_callers_own",
        ),
        "A tenant moves another one's KV about.",
    ),
    Mutant(
        "tenant-moves-streams",
        "app/continuation/routes.py",
        "        require_admin(current_request().caller)\n        found = live.find(request_id)\n",
        "        found = live.find(request_id)\n",
        (TESTS + "continuation/test_live_requests.py::test_only_an_administrator_sees_and_moves",),
        "A client interrupts the streams of others.",
    ),
    Mutant(
        "forwarded-stranger-is-this-machine",
        AUTH,
        "    if any(name in headers for name in _FORWARDED):\n        return False\n",
        "",
        (TESTS + "control/test_tenants.py::test_who_works_on_this_machine",),
        "Behind a proxy on the same machine every client is an administrator.",
    ),
    Mutant(
        "web-page-is-this-machine",
        AUTH,
        "    if origin is not None and not is_loopback(_host_of(origin)):\n        return False\n",
        "",
        (TESTS + "control/test_tenants.py::test_who_works_on_this_machine",),
        "A page that the operator opens clears the cache.",
    ),
    Mutant(
        "metrics-for-every-tenant",
        AUTH,
        "if path == METRICS and not (caller is not None and caller.admin) and not self._opens_metrics(headers):",
        "if path == METRICS and caller is None and not self._opens_metrics(headers):",
        (TESTS + "control/test_tenants.py::test_metrics_need_an_administrators_key_or_their_own",),
        "A tenant reads how much the others use.",
    ),
    Mutant(
        "body-not-bounded",
        "app/gate/body_limit.py",
        "            if len(body) > self.max_body_bytes:\n                raise too_large\n",
        "",
        (TESTS + "gate/test_access.py::test_a_body_over_the_limit_is_413",),
        "A body that comes in chunks fills the ingress's memory.",
    ),
    Mutant(
        "media-not-refused",
        "app/gate/request_bounds.py",
        'if isinstance(part, dict) and part.get("type") == "tool_result" and isinstance(part.get("content"), list):',
        'if isinstance(part, dict) and part.get("type") == "tool_results" and isinstance(part.get("content"), list):',
        (TESTS + "gate/test_bounds.py::test_content_that_is_no_text_is_refused_before_anybody_looks_at_it",),
        "A URL in what a tool returned is fetched by the server.",
    ),
    Mutant(
        "nesting-not-bounded",
        "app/gate/bounded_json.py",
        "        if depth > DEEPEST:\n",
        "        if depth > 1000 * DEEPEST:\n",
        (TESTS + "gate/test_bounded_json.py",),
        "A body of brackets ends the parser.",
    ),
    Mutant(
        "member-given-twice",
        "app/gate/bounded_json.py",
        "        if name in members:  # one",
        "        if name in members and name.startswith(name * 2):  # one",
        (TESTS + "gate/test_bounded_json.py",),
        "A proxy checks one value, and the server takes the other.",
    ),
    Mutant(
        "debt-forgiven",
        "app/gate/rates/bucket.py",
        "        self._level = min(float(self.per_minute), self._level - amount)\n",
        "        self._level = max(0.0, min(float(self.per_minute), self._level - amount))\n",
        (TESTS + "gate/test_token_bucket.py",),
        "Answers that are longer than expected cost a tenant nothing.",
    ),
    Mutant(
        "slice-of-others-taken",
        "app/gate/fair_shares.py",
        "        return self.capacity - self.held - others_slices\n",
        "        return self.capacity - self.held\n",
        (TESTS + "gate/test_fair_shares.py",),
        "One tenant's burst leaves another one no place at all.",
    ),
    Mutant(
        "large-turn-overtaken-for-ever",
        "app/gate/fair_line.py",
        "            waited_for = waited_for or not self._shares.held_by(tenant)\n",
        "",
        (TESTS + "gate/test_fair_shares.py",),
        "A prompt with many answers waits while small ones go before it, for ever.",
    ),
    Mutant(
        "guilty-prompt-tried-again",
        SUSPECTS,
        " or (len(named) == 1 and digest not in death.told):",
        ":",
        (TESTS + "openai/test_suspects.py",),
        "A prompt that has ended an engine is given to a second one.",
    ),
    Mutant(
        "innocent-prompts-stay-suspects",
        SUSPECTS,
        "            death.solved = True\n",
        "",
        (TESTS + "openai/test_suspects.py::test_who_tells_of_a_death_after_its_culprit_was_found_is_no_suspect_of_it",),
        "Those that were in an engine with a deadly prompt wait for trials that are over.",
    ),
    Mutant(
        "tenant-left-out-of-a-suspects-name",
        RETRIES,
        "    head = blocks[-1] if blocks else request.cache_salt.encode()\n",
        '    head = blocks[-1] if blocks else b""\n',
        (TESTS + "openai/test_retry.py::test_another_tenants_prompt_of_the_same_words_is_not_refused",),
        "A tenant has another one's prompt refused.",
    ),
    Mutant(
        "tenant-and-salt-run-together",
        KEYS,
        "f\"{tenant}\\0{user_salt or ''}\"",
        "f\"{tenant}{user_salt or ''}\"",
        (TESTS + "gate/test_access.py::test_tenant_and_salt_cannot_be_mistaken_for_another_pair",),
        "Tenant `ab` with salt `c` reads the KV of tenant `a` with salt `bc`.",
    ),
    Mutant(
        "tenants-fidelity-not-asked",
        "app/openai/fidelity.py",
        "fidelity = asked.fidelity or self.by_tenant.get(tenant, self.deployment)",
        "fidelity = asked.fidelity or self.deployment",
        (
            TESTS + "openai/test_fidelity.py::"
            "test_the_request_decides_before_the_tenant_and_the_tenant_before_the_deployment",
        ),
        "A tenant that must be exact is not, or the other way round.",
    ),
    Mutant(
        "answer-of-another-salt-put-in",
        TURNS,
        '    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass") + b"\\0", digest_size=16)\n',
        "    return hashlib.blake2b(digest_size=16)\n",
        (TESTS + "answers/test_turns.py::test_nobody_gets_what_was_sampled_for_another",),
        "What was sampled under one salt is put into a prompt under another.",
    ),
    Mutant(
        "answer-of-another-text-put-in",
        TURNS,
        "            if turn.text and turn.text == texts[end]:\n",
        "            if turn.text and texts[end]:\n",
        (TESTS + "answers/test_turns.py",),
        "A client that edits an answer is answered as if it had not.",
    ),
    Mutant(
        "outputs-of-a-dead-replica-dropped",
        "app/backend/merged_outputs.py",
        "            if waiting is not None:\n",
        "            if waiting is not None and (end is None or isinstance(end, StopAsyncIteration)):\n",
        (TESTS + "backend/test_merged_outputs.py::test_what_came_before_a_replica_died_is_read_before_the_error",),
        "What a replica sent before it died is computed again elsewhere, and the client waits.",
    ),
    Mutant(
        "chunk-at-the-beginning",
        "app/blending/recognition.py",
        "            if span.start and span.tokens >= min_tokens:\n",
        "            if span.tokens >= min_tokens:\n",
        (TESTS + "blending/test_recognition.py",),
        "A prompt's own prefix, which is exact, is blended.",
    ),
    Mutant(
        "events-of-another-tenant-told",
        "app/events/watchers.py",
        "        return self.admin or tenant == self.tenant\n",
        "        return self.admin or bool(self.tenant)\n",
        (TESTS + "events/test_watchers.py",),
        "A tenant watches what others send.",
    ),
    Mutant(
        "token-without-a-row-sent-on",
        "app/openai/vocabulary/rows.py",
        "default=0)) >= rows:\n",
        "default=0)) < 0:\n",
        (TESTS + "openai/vocabulary/test_vocabulary_rows.py",),
        "A prompt with a token that a fine-tune added ends one engine after the other.",
    ),
    Mutant(
        "verdicts-of-another-tenant",
        "app/openai/constraint_pool.py",
        "pickle.dumps((tenant, constraint))",
        "pickle.dumps((bool(tenant), constraint))",
        (TESTS + "openai/test_constraint_pool.py::test_no_tenant_learns_from_a_verdict_what_another_has_sent",),
        "A tenant learns by timing which structured outputs another one has sent.",
    ),
)
