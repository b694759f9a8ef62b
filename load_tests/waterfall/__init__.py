"""Where a request's time goes, stage by stage, and the same requests at plain `vllm serve` and Ray Serve LLM.

servers.py  the arms, each a server of its own with the same engine
prompts.py  prompts of random lengths: tiny ones, and long ones that come back
wire.py     a client that costs little: one connection, one stream at a time
measure.py  sends them, from the device, the CPU tier and Redis, at a given concurrency
report.py   tables, JSON and a picture
"""
