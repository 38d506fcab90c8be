"""Before anything runs: what fits, and how it would run. Called by cli/."""
