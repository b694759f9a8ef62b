"""Who runs next in a replica's engine, what a preempted request finds again, and how long a step may be."""
