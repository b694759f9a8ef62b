"""Which request runs next and how much a step computes: policies, answers' lengths, the step's time, tenants.

`rebalancing` says which streams leave a replica that is short of KV, and which prompts one replica prefills for
another.
"""
