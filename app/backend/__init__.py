"""What stands behind the ingress, as protocols and over Serve handles.

`protocols` says what the ingress asks; `serve` answers over Serve's handles; `replica_call` is one call of a replica;
`parts_watch` and `health` say how each part is; `replica_errors` reads which failure is whose; `engine_elsewhere` is
what only an engine could answer.

On the ingress's event loop. May import `gate` and `metrics`, and of `deployments` what crosses processes.
"""
