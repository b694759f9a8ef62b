"""Who runs next: how long answers will be, and whose turn it is."""
