"""What people see of the index: the hottest part of the trie, in bounded work, and how a chain's blocks are called.

Nothing here changes anything.

On the manager's thread. May import `index` and `segments`.
"""
