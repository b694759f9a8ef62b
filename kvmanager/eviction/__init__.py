"""Which segment goes first, and which must not go.

`policies/` has the orders of eviction; `reuse_model` learns when a segment is used again; `pins` shields chains
for a while; `quotas` gives tenants room of their own; `device_ranks` says what a device keeps.

May import `index` and `segments`. A new policy: one file in `policies/`, one line in its `__init__`.
"""
