"""A scripted engine that takes its time to load."""

from __future__ import annotations

import time

from scripted_engine import ScriptedEngine

from flatout.config import Config


class SlowStart(ScriptedEngine):
    def __init__(self, config: Config):
        time.sleep(2)
        super().__init__(config)
