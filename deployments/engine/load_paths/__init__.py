"""Ways for KV to enter a request's blocks, behind one interface: README.md."""
