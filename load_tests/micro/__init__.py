"""One question each, about one part: the engine, the manager, the ways between the tiers. No HTTP, or little of it."""
