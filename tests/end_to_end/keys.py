"""The keys of the server that has some."""

OPERATOR_KEY = "operators-key"
TENANT_KEYS = {"alpha": "alpha-key", "beta": "beta-key"}
