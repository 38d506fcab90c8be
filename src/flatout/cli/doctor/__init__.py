"""`flatout doctor ...`: the doctor's verbs, one file each; what they show is doctor/'s to know. Called by cli/__init__.py."""
