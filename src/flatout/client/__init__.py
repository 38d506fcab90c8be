"""A client of any OpenAI-compatible endpoint. Knows nothing of the engine behind it."""
