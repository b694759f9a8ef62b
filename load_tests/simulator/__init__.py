"""The simulator: replays traces through the manager that serves. `python -m load_tests.simulator --help`.

It imports the brain, and needs neither Ray nor torch nor vLLM. How its parts meet:

- `trace.read_trace` gives requests, `replay.Setup` says what is simulated, `costs.Costs` what it costs.
- `replay.replay` serves a trace on one replica, `cluster.simulate` on several behind a router of `routers`; `figures`
  gives both results the same shape.
- `options` checks a command, `runs` runs its setups side by side, `report` and `plot` show the results.
"""
