"""The command line: `flatout VERB ...`. Finds the verb, parses its flags and turns every expected error into one last line.

One file a verb, loaded when it is asked for; each has configure(parser) and run(args). Imports nothing heavy. Entry point: main().
"""

from __future__ import annotations

import importlib
import os
import sys

from flatout import __version__
from flatout.cli.flags import Parser, UsageError, nearest
from flatout.config import ConfigError
from flatout.modelfile.spec import ModelFileError
from flatout.request import RequestError

VERBS = {  # verb -> (module with configure() and run(), what follows it, what it does)
    "generate": ("flatout.cli.generate", "PROMPT", "answer one prompt and say how fast that was"),
    "chat": ("flatout.cli.chat", "[MODEL]", "talk with a model in the terminal"),
    "serve": ("flatout.cli.serve", "[MODEL]", "an OpenAI-compatible HTTP server"),
    "top": ("flatout.cli.top", "[--url URL]", "a running server, live: load, ledger, verdict"),
    "tune": ("flatout.cli.tune", "[MODEL]", "choose a GPU's matrix products by whole steps"),
    "doctor": ("flatout.cli.doctor.url", "URL|MODEL", "what limits a server, anybody's, or a model here"),
    "doctor hardware": ("flatout.cli.doctor.hardware", "", "what this machine is, and gives when measured"),
    "doctor selfcheck": ("flatout.cli.doctor.selfcheck", "[MODEL]", "hold a model's fast arithmetic against float32"),
    "doctor plan": ("flatout.cli.doctor.plan", "[MODEL]", "what fits and how fast it would be, before loading"),
    "doctor whatif": ("flatout.cli.doctor.whatif", "[MODEL]", "what a changed setting, dtype or GPU would bring"),
    "doctor report": ("flatout.cli.doctor.report", "[--url URL]", "what a flatout server did, as one HTML file"),
    "doctor trace": ("flatout.cli.doctor.trace", "[MODEL]", "steps for Perfetto, the largest costs in words"),
    "doctor ceiling": ("flatout.cli.doctor.ceiling", "[MODEL]", "what HTTP and host take of the engine"),
    "doctor --apply-best": ("flatout.cli.doctor.apply_best", "[MODEL]", "the best remedy tried: confirmed or retracted"),
    "simulate": ("flatout.cli.simulate", "[MODEL]", "a load on paper: throughput, TTFT, TPOT"),
    "pull": ("flatout.cli.pull", "[MODEL]", "download a model into the cache"),
    "bench offline": ("flatout.bench.offline", "", "time fixed work on this machine"),
    "bench load": ("flatout.bench.load", "--url URL", "put a load on a running server, anybody's"),
    "bench ledger": ("flatout.bench.ledger", "", "what recording every step costs"),
    "bench compare": ("flatout.bench.compare", "", "time the same work here and in Transformers"),
    "bench compare-cpu": ("flatout.bench.compare_cpu", "", "time the same GGUF file here and in llama.cpp"),
}


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 an error that the last line names, 2 a wrong verb or flag, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--debug" in arguments:
        return _run([a for a in arguments if a != "--debug"])
    try:
        return _run(arguments)
    except UsageError as error:
        return _fail(str(error), 2)
    except (ConfigError, ModelFileError, RequestError) as error:
        return _fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output left (| head): nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("--help", "-h", "help"):
        print(_help())
        return 0
    if verb == "--version":
        print(f"flatout {__version__}")
        return 0
    if rest and f"{verb} {rest[0]}" in VERBS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    inner = [v for v in VERBS if v.startswith(f"{verb} ")]
    if verb in VERBS and rest and rest[0].isalpha() and (near := nearest(rest[0], [v.rpartition(" ")[2] for v in inner])):
        raise UsageError(f"{verb} {rest[0]}: no such verb{near}; say {verb} URL, {verb} MODEL, {' or '.join(inner)}")
    if verb not in VERBS:
        raise UsageError(
            f"{verb}: say {' or '.join(inner)}" if inner else f"{verb!r} is not a verb{nearest(verb, VERBS)}; see flatout --help"
        )
    name, follows, does = VERBS[verb]
    module = importlib.import_module(name)
    parser = Parser(f"flatout {verb}", follows, does, everything="--help-all" in rest)
    module.configure(parser)
    code: int = module.run(parser.parse_args(rest))
    return code


def _help() -> str:
    lines = [
        "usage: flatout VERB [flags]",
        "",
        "Runs open-weight language models as fast as this machine allows.",
        "",
        "verbs:",
        *(f"  {verb + ' ' + follows:28}{does}" for verb, (_, follows, does) in VERBS.items()),
        "",
        "examples:",
        '  flatout generate "Why is the sky blue?"',
        "  flatout chat ./my-model --max-model-len 8k",
        "  flatout serve org/name --port 8000",
        "",
        "A model is a local folder (config.json and safetensors), a .gguf file, a name",
        "on the Hugging Face hub (org/name), or smollm2: the default, 90 MB.",
        "",
        "  flatout VERB --help       the verb's common flags; --help-all shows the rest",
        "  flatout VERB --debug      full traceback of an error",
        "  flatout --version",
    ]
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    print(f"flatout: error: {' '.join(message.split())}", file=sys.stderr)
    return code
