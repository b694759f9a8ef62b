"""What is moved, and under which promise: loads, saves, copies to Redis, orders to devices.

`plans` answers where a prompt's segments lie, under a lease; `saves` grants room; `demotions`, `offloads` and
`renewals` say what is copied down and what must not expire; `directives` are the orders to devices, `directive_ledger`
their books.

May import `eviction`, `index` and `segments`.
"""
