"""What is moved, and under which promise: loads, saves, copies to Redis, orders to devices.

`plans` answers where the segments of a prompt, and of its `chunks`, lie, under one of the `leases`; `saves` grants
room; `demotions`, `offloads` and `renewals` say what is copied down and what must not expire; `directives` are the
orders to devices, `directive_ledger` their books.

May import `eviction`, `index` and `segments`.
"""
