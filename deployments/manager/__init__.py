"""The brain with a clock and ears: `kvmanager.manager.KVManager` as an actor.

`actor` receives the calls; `prompt_planner` answers those about prompts; `api` is the table of the control API's calls,
which `control`, `prompt_control` and `reports` answer; `tier_registry` and `replica_state` know tiers and replicas;
`directive_sender` sends directives and awaits how they end, `directive_log` keeps the last of them; `demoter` and
`redis_renewer` copy to Redis in the background; `eviction_queue` holds what a tier still has to evict. Policy does not
belong here: what to keep, evict or send where is `kvmanager`'s.

An actor of the application, on its event loop. May import `protocol` and `kvmanager`. Never vLLM or torch.
"""
