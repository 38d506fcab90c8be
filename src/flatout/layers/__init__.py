"""Layers: weights and the ops that use them, by ModelSpec fields. No family names, no files."""
