"""Load or recompute: how long each takes, measured, and how much of a plan is worth loading.

`load_rates` and `changing_time` learn the rates; `load_choice` and `load_split` decide; `probes` measures what the
choice would never try; `short_prompts` and `overlap` are the cases at both ends; `step_estimate` says how long a step
may take; `handover_choice` whether a prompt is prefilled on one replica and decoded on another.

May import `moves`, `index` and `segments`. Runs in the manager and in the replica's process.
"""
