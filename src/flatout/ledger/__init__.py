"""Where time went, without torch."""
