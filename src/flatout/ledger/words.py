"""What the ledger's parts are called where people read them, and in which order they are shown: the floor first, what nobody caused last.

Plain data. Called by server/dashboard/ and cli/top.py.
"""

from __future__ import annotations

PARTS = {  # part of a step's time (ledger.py: PARTS) -> (name, what it is)
    "floor_bandwidth": ("memory floor", "what the bytes of ops that bytes limit take at the measured bandwidth"),
    "floor_compute": ("compute floor", "what the operations of the other ops take at the measured rate"),
    "kernels": ("kernels over the floor", "time of ops beyond their floors"),
    "padding": ("padding", "rows computed for nobody"),
    "sample": ("sampling", "from logits to tokens, where it is timed apart"),
    "launch": ("launch gaps", "the device at hand, between ops and between steps"),
    "host_drain": ("host: taking requests in", "the device waited for it"),
    "host_schedule": ("host: scheduling", "the device waited for it"),
    "host_inputs": ("host: inputs", "the device waited for it"),
    "host_wait": ("host: noticing the end", "the device waited for it"),
    "host_commit": ("host: commit", "the device waited for it"),
    "host_deliver": ("host: delivery", "the device waited for it"),
    "communication": ("communication", "between ranks"),
    "residual": ("residual", "time that no clock saw"),
    "underway": ("step under way", "told when the step ends"),
    "idle": ("no load", "no request was there"),
}
ALWAYS = ("floor_bandwidth", "floor_compute", "kernels", "sample", "launch", "residual", "idle")  # shown though they took nothing
