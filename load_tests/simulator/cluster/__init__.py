"""A trace on several replicas: routing, queues, loads next to prefills, a mirror that is late.

`replay` runs it, `replica` is one engine with its pool, `routers` are those that are compared (`ours` is the code that
serves), `report` counts. May import `one_replica` and everything below the simulator.
"""
