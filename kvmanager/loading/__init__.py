"""Load or recompute: how long each takes, measured, and how much of a plan is worth loading.

`load_rates` and `changing_time` learn the rates; `load_choice` and `load_split` decide; `probes` measures what the
choice would never try; `short_prompts` and `overlap` are the cases at both ends; `prefix_load` says how long a load may
take, and when waiting for it no longer pays.

May import `moves`, `index` and `segments`. Runs in the manager and in the replica's process.
"""
