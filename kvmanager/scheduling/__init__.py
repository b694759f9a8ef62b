"""Who runs next in an engine, and how much a step computes: policies, bounds on preemption, the step's time."""
