"""Rules about extensions, and what of the settings they look at; see `rules`."""
