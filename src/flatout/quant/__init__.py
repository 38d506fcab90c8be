"""Schemes: how weights are stored and multiplied; dequantising of GGUF blocks."""
