"""An engine in a process of its own: `engine.process: process`.

`front` is the replica's end: it starts vLLM's stock AsyncLLM, whose engine process `core` takes over: vLLM's
EngineCoreProc with the connector, the port to the cluster and the watches in it. `channel` carries what a replica asks
of it beside vLLM's requests; `service` answers that, and is what a replica asks where the engine is a thread, too.
`flight_recorder` is the memory that both share: what is known of an engine that ended without a word.
"""
