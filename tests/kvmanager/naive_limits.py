"""What people ask of the naive manager: quotas of tenants, and pins."""


def set_quotas(naive, tier, quotas):
    """Return whether they are accepted."""
    budgets = [budget for location, budget in naive.budgets.items() if location.tier is tier and budget]
    if any(sum(quotas.values()) > budget for budget in budgets):
        return False
    naive.quotas[tier] = quotas
    return True


def pin(naive, now, keys, ttl_s):
    """Return what comes of it: "unknown", "budget" or the bytes of the chains."""
    naive.end_pins(now)
    if not all(key in naive.known for key in keys):
        return "unknown"
    chains = {above for key in keys for above in naive.ancestors(key)}
    if sum(naive.sizes[key] for key in chains | naive.pinned()) > naive.pin_budget:
        return "budget"
    for key in keys:
        naive.pins[key] = max(naive.pins.get(key, 0.0), naive.now + ttl_s)
    return sum(naive.sizes[key] for key in chains)


def unpin(naive, now, keys):
    naive.end_pins(now)
    if not all(key in naive.known for key in keys):
        return "unknown"
    return [key for key in dict.fromkeys(keys) if naive.pins.pop(key, None) is not None]
