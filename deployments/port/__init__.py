"""The connector's one way to the cluster: `protocol.kv_port.KVPort` over Ray.

`cluster_port` has deadlines, counters and reports; `tier_reader` reads segments from the tiers; `calls` has what both
call with: breakers, measured waits, and a loop of its own for the engine thread's questions.

Called from the engine's, load and save threads; reports leave on a thread of its own. Imports Ray, never vLLM.
Nothing here raises, and nothing waits beyond its deadline: the answer is then "nothing", counted.
"""
