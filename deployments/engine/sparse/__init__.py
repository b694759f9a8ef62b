"""How vLLM attends to a sparse prefix: fewer keys in some layers, exactly as if the others were masked. See README.md."""
