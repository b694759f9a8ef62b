"""Names and types that both ends of a call share, and nothing of either end: the words that cross processes.

Belongs here: the messages (`wire`, `engine_facts`), the connector's one interface to the cluster (`kv_port`), how the
manager is found and survived (`manager_client`, `actor_finder`), and several calls sent as one (`call_batches`). Also
what each process does for itself: its log (`log_lines`) and its memory (`memory`).
Does not belong here: an actor, an engine, a policy.

May import `kvmanager` and `configs`. Every other room of `deployments` may import it. Start with `wire`.
"""
