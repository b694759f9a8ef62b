"""How many replicas are wanted, from what the running ones say of themselves.

`demand`: what a replica says, how long its queue takes, and from that to a number of replicas; `book`: what was decided
last, for people, and how many there should be while they come and go.

Imports nothing of the brain's. `demand` runs in the replicas and in Ray Serve's controller (`deployments.scaling`),
`book` in the manager and in the ingress.
"""
