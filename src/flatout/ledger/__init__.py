"""Where time went, and what to do about it. No torch."""
