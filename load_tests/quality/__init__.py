"""One table of what every way of keeping less KV, or reusing more, costs in answers (`make bench-quality`)."""
