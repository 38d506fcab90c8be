"""Attention backends: a KV cache of their layout and a plan once a step; the arithmetic is kernels/attention.py."""
