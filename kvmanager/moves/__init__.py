"""What is moved, and under which promise: loads, saves, copies to Redis, orders to devices.

`plan` is what is asked for a prompt and what is answered; `chain_search` finds where its segments lie, and `planner`
makes the plan, under one of the `leases`; `plan_draft` is how extensions add to it. `saves` grants room; `demotions`,
`offloads` and `renewals` say what is copied down and what must not expire; `directives` are the orders to devices,
`directive_ledger` their books.

May import `eviction`, `index` and `segments`.
"""
