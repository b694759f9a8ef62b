"""Tenants of one server: what a modest one notices of one that floods, and what two get that always wait."""
