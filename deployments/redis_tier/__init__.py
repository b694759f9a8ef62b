"""The owner of Redis: everything about it except the transfer of segments.

`actor` starts the embedded server or checks yours, claims the namespace, reads what lies there, watches it, and deletes
what the manager evicts. `access` is the blocking half of that. `server` and `folder` are the embedded redis-server and
its data; `entries` names what lies in a Redis, and manages what is other models'.

An actor of the application on its event loop; what blocks runs on its threads. May import `segment_store` and
`protocol`. Never vLLM or torch.
"""
