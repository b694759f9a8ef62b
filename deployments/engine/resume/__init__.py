"""A request enters an engine with tokens already answered, as if it had been preempted there."""
