"""An engine in a process of its own: `engine.process: process`.

`front` is the replica's end: it starts vLLM's stock AsyncLLM, whose engine process `core` takes over: vLLM's
EngineCoreProc with the connector, the port to the cluster and the watches in it. `channel` carries a replica's
questions other than vLLM's requests; `service` answers them, and also answers a replica whose engine is a thread.
`flight_recorder` is the memory that both share: the record of an engine that ended without a word.
"""
