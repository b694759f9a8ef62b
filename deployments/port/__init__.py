"""The connector's one way to the cluster: `protocol.kv_port.KVPort` over Ray.

`ray_port` has deadlines, breakers, counters and reports; `tier_reader` reads segments from the node's CPU tier;
`layer_groups` cuts a segment into what is sent together.

Called from the engine's, load and save threads; reports leave on a thread of its own. Imports Ray, never vLLM.
Nothing here raises, and nothing waits beyond its deadline: the answer is then "nothing", counted.
"""
