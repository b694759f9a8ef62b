"""The order of requests in a replica's engine, the KV that a preempted request finds again, and the length of steps."""
