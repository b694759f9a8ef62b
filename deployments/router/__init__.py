"""Serve's request router: which replica a prompt goes to.

`prefix_affinity` translates between Serve and `kvmanager.routing`, which ranks the replicas, and keeps Serve from
sending twice what a replica has begun; `placement_feed` keeps the mirror of the manager's index up to date by a long
poll; `running_replicas` tells the ingress which replicas live, and what decode replicas lack of a prompt.
No call to the manager on a request's path.

Runs on the ingress's event loop, which is also that of its handle's router. May import `protocol`. Never vLLM.
"""
