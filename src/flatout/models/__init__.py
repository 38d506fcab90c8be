"""The decoder, and the way from checkpoint names and files into it."""
