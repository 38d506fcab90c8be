"""The papers are true: what docs/ and README name exists, links lead somewhere, and commands shown are commands."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from flatout.cli import VERBS
from flatout.cli.flags import Parser

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "flatout"
PAPERS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
REFERENCE = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)(?::([\w.]+))?`")


def names_in(path: Path) -> set[str]:
    """Names that a file defines: functions, classes, methods, fields and attributes (Class.name), constants, and names it imports."""
    found: set[str] = set()

    def targets(node: ast.AST) -> list[str]:
        left = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        return [ast.unparse(t) for t in left]

    for node in ast.parse(path.read_text()).body:
        found.update(targets(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
                found.update(f"{node.name}.{t.removeprefix('self.')}" for t in targets(inner))
    return found


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_files_and_names_exist(paper):
    for file, name in REFERENCE.findall(paper.read_text()):
        path = ROOT / file if file.startswith(("tests/", "src/")) else SRC / file
        assert path.is_file(), f"{paper.name} names {file}"
        if name:
            assert name in names_in(path), f"{paper.name} names {name} in {file}"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_folders_and_links_exist(paper):
    text = paper.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (paper.parent / target).exists(), f"{paper.name} links to {target}"
    for folder in re.findall(r"`([a-z_0-9]+/)`", text):
        assert (SRC / folder).is_dir() or (ROOT / folder).is_dir(), f"{paper.name} names {folder}"


def test_the_walk_names_enough():
    assert len(REFERENCE.findall((ROOT / "docs/walk.md").read_text())) > 30


def shown_commands():
    for paper in PAPERS:
        for block in re.findall(r"^```(?:sh|console)?\n(.*?)^```", paper.read_text(), re.M | re.S):
            for line in block.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words and words[0] in ("make", "flatout", "python"):
                    yield pytest.param(words, id=f"{paper.name}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(shown_commands()))
def test_commands_shown_are_commands(words):
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
        assert {w for w in words[1:] if "=" not in w} <= targets
        return
    if words[0] == "python":
        assert words[1] == "-m"
        words = ["flatout", *words[2].removeprefix("flatout.").split("."), *words[3:]]
    verb = next(v for v in sorted(VERBS, key=len, reverse=True) if words[1:3] == v.split() or words[1] == v)
    parser = Parser("flatout", "", "test")
    __import__(VERBS[verb][0], fromlist=["configure"]).configure(parser)
    parser.parse_args(words[1 + len(verb.split()) :])  # a flag that does not exist raises
