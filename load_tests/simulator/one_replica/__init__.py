"""A trace on one replica: the same calls to `KVManager` as the deployments make, in the same order.

`replay` runs it, `serving` makes the calls, `clairvoyant` and `oracle` are Belady's rule and the future that it needs,
`ranked_pool` is a device's blocks by rank. Start with `serving`.
"""
