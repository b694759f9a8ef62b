"""The keys of the server that has some, and its other secrets: words that stand nowhere else."""

OPERATOR_KEY = "operators-key-7f3a9c"
TENANT_KEYS = {"alpha": "alpha-key-52be10", "beta": "beta-key-e81d44"}
FOREIGN_KEY = "gamma-key-0c96d7"
"""In the environment."""
METRICS_KEY = "metrics-key-b5503e"
COLLECTORS_PASSWORD = "collectors-password-1f82aa"
HUB_TOKEN = "hubs-token-93cc6d"
SERVER_SECRET = 8 * "5ec2e7d1"
