"""The doctor: what this machine can give, and whether its fast arithmetic says what the plain one says. Called by cli/."""
