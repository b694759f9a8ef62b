"""The replica: the Serve deployment around one engine, and its link to the manager.

`replica` answers requests; `prompt_plans` asks the manager for each prompt's plan; `manager_link` registers and polls
for directives; `serve_process` says how Serve works in its process.

Runs on the replica's event loop, and speaks with the engine through `EngineThread.call`. May import `engine`, `port`,
`transfer` and `protocol`. Start with `replica.Replica.generate`.
"""
