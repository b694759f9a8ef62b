"""What is moved, and under which promise: loads, saves, copies to Redis, orders to devices.

`plan` is what is asked for a prompt and what is answered; `planner` finds where its segments, and those of its
`chunks`, lie, under one of the `leases`; `saves` grants room; `demotions`, `offloads` and `renewals` say what is copied
down and what must not expire; `directives` are the orders to devices, `directive_ledger` their books.

May import `eviction`, `index` and `segments`.
"""
