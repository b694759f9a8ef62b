"""Which request runs next, and how long a step is: policies and step budgets, through the whole server."""
