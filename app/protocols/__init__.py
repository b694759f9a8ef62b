"""Further protocols that clients speak: OpenAI's Responses and Anthropic's Messages, by vLLM's own serving classes.

What chat has, they have: they pass the same gate, go through the same renderer and engine client, and are answered by
the same replicas. What a protocol asks of a server beyond that, and that is not served, is refused in words.
"""
