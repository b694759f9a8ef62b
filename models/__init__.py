"""The embedded demo model and the code that trains it; see `models/README.md`."""
