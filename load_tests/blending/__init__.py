"""Blending judged without a server: what a check layer and a ratio cost in answers and KL (`make profile-blend`)."""
