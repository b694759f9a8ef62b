"""Settings of crosskv, presets of models, and what renders their documentation. Imports no other package."""
