"""python -m flatout: the same as the command flatout."""

from flatout.cli import main

raise SystemExit(main())
