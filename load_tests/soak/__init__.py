"""Which process of a server grows while it works."""
