"""How many replicas are wanted, from what the running ones say of themselves.

`figures`: what a replica says, and how long its queue takes; `demand`: from figures to a number of
replicas; `book`: what was decided last, for people; `wanted`: how many there should be while they come and go.

Imports nothing of the brain's. `figures` runs in the replicas, `demand` in Ray Serve's controller
(`deployments.scaling`), `book` in the manager, `wanted` in the ingress.
"""
