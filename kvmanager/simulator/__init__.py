"""The simulator: replays traces through the manager that serves. `python -m kvmanager.simulator --help`.

The one place below kvmanager/ that reads files and uses typer, rich and matplotlib; the rest of the brain imports
nothing from here. How its parts meet:

- `trace.read_trace` gives requests, `replay.Setup` says what is simulated, `costs.Costs` what it costs.
- `replay.replay` serves a trace on one replica, `cluster.simulate` on several behind a router of `routers`; `figures`
  gives both results the same shape.
- `options` checks a command, `runs` runs its setups side by side, `report` and `plot` show the results.
"""
