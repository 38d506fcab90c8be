"""Ops: each a fast path (or several), a reference and a cost in one file. Imports nothing else of ours."""
