"""core: who runs, with how many tokens, in which blocks, and when it ends. numpy alone; no torch, no I/O, no clock (time is passed in).

engine.py uses scheduler.Scheduler; the other files are its parts: policy.py (who), blocks.py (where), prefix.py (what is cached),
stop.py (when it ends), logprobs.py (rows of arrays to what users get).
"""
