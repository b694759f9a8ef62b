"""Where the last message of a prompt begins, for models with states: a step of the engine ends there."""
