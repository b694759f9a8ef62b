"""The engines that the experiments ask: plain vLLM, and one with tiers, of equal limits."""
