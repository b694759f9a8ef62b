"""What people see of the index: the tree of segments, and what an order would change. Nothing here changes anything.

`tree` chooses the hottest part of the trie; `what_if` counts what a clear, an eviction or a move would take. Both do
bounded work, on the manager's thread. May import `index`, and what a plan would find (`moves`).
"""
