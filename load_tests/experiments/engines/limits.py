"""What the engines of the experiments hold and take into a step: equal for all, so that they can be compared."""

DEVICE_BLOCKS = 640
"""Of plain vLLM; blocks of 32 tokens: a prompt of 16K and its answer."""
MOST_SEQUENCES = 64
STEP_TOKENS = 2048
"""Of one engine step at most. Not the setting's default, so that machines with another default can be compared."""
WIDEST_STEP_TOKENS = 4096
