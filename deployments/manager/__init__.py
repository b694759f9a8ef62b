"""The brain with a clock and ears: `kvmanager.manager.KVManager` as an actor.

`actor` receives the calls, and answers those about prompts; `control` has the table of the control API's calls, which
it, `prompt_control` and `reports` answer; `tier_registry` knows the tiers and what each still has to evict,
`replica_state` the replicas; `directive_sender` sends directives and awaits how they end, `directive_log` keeps the
last of them; `redis_copies` copies to Redis in the background. Policy does not belong here: what to keep, evict or send
where is `kvmanager`'s.

An actor of the application, on its event loop. May import `protocol` and `kvmanager`. Never vLLM or torch.
"""
