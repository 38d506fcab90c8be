"""The command line without a model: flags made from fields, help screens, and errors as one last line with the right exit code."""

import io
import subprocess
import sys
from dataclasses import fields

import pytest

from flatout import __version__
from flatout.cli import VERBS, main
from flatout.cli.flags import Parser, add_config_flags, config_options, size
from flatout.config import Config, flag_of


def error(capsys, *argv):
    """Exit code and last line of a failing command."""
    code = main(list(argv))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = captured.err.rstrip("\n").split("\n")
    assert len(lines) == 1, "one line, not a screen of usage"
    assert lines[0].startswith("flatout: error: ")
    return code, lines[0]


def helped(capsys, monkeypatch, *argv):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        assert main(list(argv)) == 0
    except SystemExit as leave:  # argparse's help action
        assert leave.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["-h"], [], *([*v.split(), "--help"] for v in VERBS)], ids=" ".join)
def test_help_fits_a_screen_and_groups_its_flags(capsys, monkeypatch, argv):
    text = helped(capsys, monkeypatch, *argv)
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    if len(argv) > 1:
        assert sum(line.endswith(":") and not line.startswith(" ") for line in lines) >= 3


@pytest.mark.parametrize("verb", ["generate", "chat", "serve", "tune", "doctor selfcheck", "bench offline", "bench compare"])
def test_help_all_shows_every_setting(capsys, monkeypatch, verb):
    text = helped(capsys, monkeypatch, *verb.split(), "--help-all")
    default = Config()
    for group in fields(Config):
        for f in fields(getattr(default, group.name)):
            if f.name not in ("model", "seed"):
                assert flag_of(f.name) in text or f"--[no-]{flag_of(f.name)[2:]}" in text


def test_the_help_names_the_ways_to_hold_weights(capsys, monkeypatch):
    text = " ".join(helped(capsys, monkeypatch, "serve", "--help-all").split())
    assert "int8, int4: any model's projections rounded while loading" in text and "gguf: those of a GGUF file" in text
    code, line = error(capsys, "generate", "x", "--quantization", "int5")
    assert code == 2 and "int5" in line and "int4" in line


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flatout {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["generte", "x"], "generate"),
        (["frobnicate"], "flatout --help"),
        (["bench"], "bench compare"),
        (["bench", "onlin"], "bench offline"),
        (["generate", "x", "--temprature", "1"], "--temperature"),
        (["generate", "x", "--max-modl-len=4k"], "--max-model-len"),
        (["generate", "x", "--max-model"], "--max-model-len"),  # no silent abbreviations
        (["chat", "--prt", "1"], "--prt"),
        (["serve", "--prt", "1"], "--port"),
        (["generate", "x", "y"], "'y'"),
        (["generate", "x", "--dtype", "bfloat"], "bfloat16"),
        (["generate", "x", "--seed"], "--seed"),
        (["generate", "x", "--top-k", "1.5"], "--top-k: '1.5' is not a whole number"),
        (["generate", "x", "--temperature", "warm"], "--temperature: 'warm' is not a number"),
        (["generate", "x", "--max-model-len", "lots"], "--max-model-len: 'lots' is not a size"),
        (["generate", "x", "--raw", "--system", "s"], "--system"),
        (["generate", "x", "--raw", "--chat-template", "{{ x }}"], "--chat-template"),
        (["generate", ""], "PROMPT"),
        (["bench", "offline", "--work", "batch9"], "batch8"),
        (["tune", "--device", "cpu"], "tune: chooses among a GPU's matrix products"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_named_with_its_mend(capsys, argv, named):
    code, line = error(capsys, *argv)
    assert code == 2
    assert named in line


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["generate", "x", "--block-size", "17"], "--block-size: must be a power of two"),
        (["generate", "x", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["generate", "x", "--threads", "0"], "--threads: must be a whole number of at least 1"),
        (["generate", "x", "--temperature", "-1"], "temperature: must be at least 0"),
        (["generate", "x", "--top-p", "0"], "top_p: must be over 0"),
        (["generate", "x", "--stop", ""], "stop: an empty stop string"),
        (["chat", "--max-tokens", "-4"], "max_tokens"),
        (["bench", "compare", "--new-tokens", "1"], "--new-tokens: must be at least 2"),
        (["generate", "x", "--model", ""], "--model: must not be empty"),
        (["chat", ""], "--model: must not be empty"),
        (["serve", "--api-key", ""], "--api-key: must not be empty"),
        (["serve", "--chat-template", "./nowhere.jinja"], "--chat-template: no file './nowhere.jinja'"),
        (["generate", "x", "--kv-cache-memory-bytes", "1G", "--num-gpu-blocks-override", "9"], "give one of them"),
        (["pull", "smollm2", "--download-dir", "there"], "smollm2: --download-dir is for models from the hub"),
        (["pull", "smollm2", "--revision", "abc"], "smollm2: --revision picks a version on the hub"),
        (["pull", "smolm2"], "did you mean smollm2?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_told_before_anything_loads(capsys, argv, named):
    code, line = error(capsys, *argv)
    assert code == 1
    assert named in line


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num-gpu-blocks-override", "1000000000"], "--num-gpu-blocks-override: 1000000000 takes"),
        (["--kv-cache-memory-bytes", "100T"], "--kv-cache-memory-bytes: 109951162777600 takes 102400.0 GiB, but"),
        (["--kv-cache-memory-bytes", "1k"], "--kv-cache-memory-bytes: 1000 is less than one block"),
        (["--max-num-seqs", "1000000000"], "--max-num-seqs: 1000000000 takes"),
        (["--max-num-batched-tokens", "1000000000"], "--max-num-batched-tokens: 1000000000 takes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_size_beyond_the_machine_is_told_before_weights_are_read(capsys, monkeypatch, default_model, argv, named):
    monkeypatch.setattr("flatout.runner.build.load_weights", None)
    code, line = error(capsys, "generate", "x", "--device", "cpu", "--threads", "1", *argv)
    assert code == 1
    assert named in line and "gpu-memory-utilization" not in line


def test_a_broken_chat_template_is_told_before_weights_are_read(capsys, monkeypatch, default_model, tmp_path):
    monkeypatch.setattr("flatout.llm.LLM", None)
    file = tmp_path / "broken.jinja"
    file.write_text("{% for m in messages %}")
    code, line = error(capsys, "generate", "x", "--chat-template", str(file))
    assert code == 1
    assert "chat template, line 1" in line


@pytest.mark.parametrize(("verb", "named"), [("generate -", "PROMPT"), ("generate", "PROMPT"), ("chat", "standard input is closed")])
def test_closed_standard_input(capsys, monkeypatch, verb, named):
    monkeypatch.setattr(sys, "stdin", None)
    code, line = error(capsys, *verb.split())
    assert code == 2
    assert named in line


def test_standard_input_that_is_no_text(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    code, line = error(capsys, "generate", "-")
    assert code == 2
    assert "PROMPT: standard input is not text in utf-8" in line


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="power of two"):
        main(["generate", "x", "--block-size", "17", "--debug"])


def test_a_wrong_flag_needs_no_torch():
    code = "import sys; from flatout.cli import main; c = main(['generate', 'x', '--block-size', '17']); assert 'torch' not in sys.modules; sys.exit(c)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 1


def parsed(*argv):
    parser = Parser("flatout test", "", "test", everything=False)
    add_config_flags(parser)
    return config_options(parser.parse_args(list(argv)))


def test_flags_give_only_what_was_said():
    assert parsed() == {}
    assert Config.make(**parsed()) == Config()
    given = parsed(
        "--max-model-len", "32k", "--no-enable-prefix-caching", "--dtype=float32", "--gpu-memory-utilization", "0.5", "--seed", "7"
    )
    assert given == {"max_model_len": 32000, "enable_prefix_caching": False, "dtype": "float32", "gpu_memory_utilization": 0.5, "seed": 7}
    assert Config.make(**given).flat().items() >= given.items()


def test_every_setting_has_a_flag():
    values = {bool: None, int: "16", float: "0.5", str: "x"}
    for name in Config.owners():
        default = Config().flat()[name]
        f = next(f for g in fields(Config) for f in fields(getattr(Config(), g.name)) if f.name == name)
        value = f.metadata["choices"][-1] if f.metadata.get("choices") else values.get(type(default), "16")
        argv = [flag_of(name)] if value is None else [flag_of(name), value]
        assert name in parsed(*argv)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("4GB", 4 * 10**9),
        ("2M", 2 << 20),
        ("512MiB", 512 << 20),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "-5", "4 G x", "1.0001k2", "4GX", "0.3", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(Exception, match="is not a"):
        size(text)


def test_a_reader_that_leaves_is_no_error():
    """flatout ... | head"""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", "from flatout.cli import main; import sys; sys.exit(main(['--help']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, 1)


def test_python_m_flatout_is_the_command():
    for arguments, code in ((["--help"], 0), (["generate", "--nonsense"], 2), (["generate", "Hi", "--model", "/nowhere"], 1)):
        done = subprocess.run([sys.executable, "-m", "flatout", *arguments], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
