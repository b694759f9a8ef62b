"""Training of the embedded demo model from generated worlds of facts; see `models/README.md`."""
