"""`flatout pull [MODEL]`: a model into the cache, and where it lies. The download is modelfile/sources.py's. Called by cli/__init__.py."""

from __future__ import annotations

from argparse import Namespace

from flatout.cli.flags import Parser, add_fields
from flatout.config import DEFAULT_MODEL, ModelConfig

SETTINGS = ("revision", "download_dir")


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"a name on the hub, or {DEFAULT_MODEL} (the default)")
    others = set(ModelConfig.__dataclass_fields__) - set(SETTINGS)
    add_fields(parser, "from the hub", ModelConfig, SETTINGS, skip=others)


def run(args: Namespace) -> int:
    from flatout.modelfile.sources import pull

    pull(getattr(args, "model", DEFAULT_MODEL), revision=getattr(args, "revision", None), download_dir=getattr(args, "download_dir", None))
    return 0
