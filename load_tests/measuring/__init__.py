"""One way to measure: arms take turns, points are kept, ratios have intervals. README.md says which file does what."""
