"""`flatout serve [MODEL]`: the HTTP server. Only flags here; the server is server/launch.py's. Called by cli/__init__.py."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

from flatout.cli.flags import Parser, add_config_flags, add_fields, config_options, given
from flatout.config import DEFAULT_MODEL, Config, ConfigError, ServerConfig, check_values

COMMON = ("host", "port", "served_model_name", "api_key")
NEEDED = ("msgspec", "zmq", "starlette", "uvicorn")


def configure(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"folder, .gguf file or hub name (default: {DEFAULT_MODEL})")
    add_fields(parser, "server", ServerConfig, COMMON)
    add_config_flags(parser, skip=("model",))


def run(args: Namespace) -> int:
    config, server = Config.make(**config_options(args)), ServerConfig(**given(args, (f.name for f in fields(ServerConfig))))
    check_values(server)
    try:
        from flatout.server.launch import serve
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        raise ConfigError(f"flatout serve: {error.name} is not installed; pip install 'flatout[serve]'") from None
    return serve(config, server)
