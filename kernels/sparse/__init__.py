"""Of each layer's KV only the tokens that are attended to most (H2O): which, and how that is stored. See README.md."""
