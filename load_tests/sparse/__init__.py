"""KV of which each layer keeps some tokens: what answers lose by it, and a model's budgets measured."""
