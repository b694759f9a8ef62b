"""What is known, and what lies where: the trie, its copies, and their placement.

`nodes` has the life of a segment as a table: start there. `trie` finds prefixes, `stores` holds what a location has,
`catalog` is the only one that changes placement and keeps the invariants, `deltas` and `snapshots` tell it to routers,
`sweeps` does long work in slices. `hotness` and `eviction_policy` are the words in which an order of eviction is given.

May import `segments`. Nothing on a request's path costs O(index).
"""
