"""Who runs next and how much a step computes: policies, answers' lengths, the step's time, what tenants were served."""
