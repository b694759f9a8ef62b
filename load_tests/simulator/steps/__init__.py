"""Replicas step by step: prefill and decode mixed in a step, step budgets, pools that run full, roles with a hand-over.

`step_cost` says what a step takes, `replica` is one engine, `fleet` its replicas and their routing, `jobs` draws the
requests. `machines` has those that the tables are of, `roles` runs their arms, `report` shows them. The older rooms
next to this one leave a step's inside out, and know the cache; this one knows no cache: every prompt is new.
"""
