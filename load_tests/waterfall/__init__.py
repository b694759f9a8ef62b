"""Where a request's time goes, stage by stage, and the same requests at plain `vllm serve` and Ray Serve LLM.

servers.py  the arms, each a server of its own with the same engine
wire.py     a client that costs little: one connection, one stream at a time
measure.py  sends prompts whose KV is on the device, in the CPU tier and in Redis, at a given concurrency
report.py   tables, JSON and a picture
"""
