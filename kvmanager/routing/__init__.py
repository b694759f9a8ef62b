"""Where a prompt should go: the cost of each replica, from a mirror of the placement.

`mirror` is a router's copy of the index; `cost` ranks the replicas, and counts at once what was just sent;
`spreading` says when a hot prefix needs one more replica; `roles` which replicas prefill and which decode.

May import `index` and `segments`. Runs in the router's process, with no call to the manager.
"""
