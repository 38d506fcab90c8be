"""Where tests find what they read. Holds no tests."""

from pathlib import Path

DATA = Path(__file__).parent / "data"
