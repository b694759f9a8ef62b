"""What a full device keeps: traces replayed over the queues that serve, in vLLM's block pool, without an engine.

`mixes` makes conversations, documents and scans; `devices` has a pool for each order; `replay` counts what is found.
The manager's part, what it says of a prompt's uses, is `replay.Uses`. One thread; time is the trace's order.
"""
