"""Which process of a server grows while it works; `slopes.py` tells growth from noise."""
