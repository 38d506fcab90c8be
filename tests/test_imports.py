"""Who may import whom, what is heavy at import, and the house rules that a script can see."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "flatout"
FILES = sorted(SRC.rglob("*.py"))

# module -> those of our own that it may import, anywhere in its files (lazily too)
MAY: dict[str, str] = {
    "config": "",
    "request": "",
    "step": "",
    "batch": "",
    "kernels": "",
    "hardware": "config request",
    "modelfile": "config request",
    "text": "modelfile config request",
    "grammar": "text request config",
    "core": "config request step",
    "ledger": "config request step hardware",
    "dist": "config",
    "attention": "kernels batch config hardware",
    "quant": "kernels",
    "layers": "attention quant kernels dist batch",
    "models": "layers quant dist batch config modelfile",
    "speculative": "models kernels batch step",
    "runner": "models layers quant attention speculative kernels dist batch step request config hardware modelfile ledger",
    "engine": "core runner ledger grammar request step config hardware modelfile",
    "torch_import": "",
    "llm": "engine text grammar modelfile request config hardware torch_import",
    "server": "request step config hardware modelfile text grammar ledger",
    "client": "text",
    "compress": "models layers quant kernels batch attention config modelfile llm",
    "doctor": "ledger runner hardware modelfile models kernels batch step config request client llm",
    "plan": "core doctor ledger hardware modelfile step request config",
}
ANYTHING = {"bench", "fleet", "cli", "__init__", "__main__"}
NO_TORCH = {"config", "request", "step", "modelfile", "text", "grammar", "core", "ledger", "server"}
# everywhere but in server, bench, cli, fleet: what is installed beside flatout in the smallest set-up
RUNTIME = {"torch", "triton", "numpy", "tokenizers", "safetensors", "jinja2"}
EXTRAS = {
    "server": {"msgspec", "zmq", "starlette", "uvicorn", "prometheus_client"},
    "modelfile": {"huggingface_hub"},
    "llm": {"rich"},  # the progress bar, where it is installed
    "cli": {"rich"},  # tables and plots, where it is installed
    "bench": {"transformers", "llama_cpp"},
}


def module_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path, *, at_import: bool = False) -> set[str]:
    """Dotted names imported in a file; with at_import only those that run when the file is imported. TYPE_CHECKING blocks count for neither."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    visit(other)
            elif at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import; the house writes flatout.x"
                found.add(child.module or "")
                found.update(f"{child.module}.{alias.name}" for alias in child.names if child.module and child.module.startswith("flatout"))
            else:
                visit(child)

    visit(ast.parse(path.read_text()))
    return found


def ours(names: set[str]) -> set[str]:
    """Top-level modules of flatout among dotted names."""
    parts = {n.split(".")[1] for n in names if n.startswith("flatout.")}
    return {p for p in parts if (SRC / p).is_dir() or (SRC / f"{p}.py").is_file()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_the_import_table_holds(path):
    module = module_of(path)
    used = imports(path)
    outside = {n.split(".")[0] for n in used} - set(sys.stdlib_module_names) - {"flatout", "__future__"}
    if module in NO_TORCH:
        assert "torch" not in outside, f"{path.name}: {module}/ works without torch"
    if module != "__init__":
        allowed = RUNTIME | EXTRAS.get(module, set())
        assert outside <= allowed, f"{path.name} imports {outside - allowed}; {module}/ may use {sorted(allowed)}"
    if module in ANYTHING:
        return
    wrong = ours(used) - set(MAY[module].split()) - {module}
    assert not wrong, f"{path.relative_to(SRC)} imports {sorted(wrong)}; {module} may import: {MAY[module] or 'nothing of ours'}"


def test_the_table_itself_has_no_cycle():
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"cycle: {' -> '.join((*above, module))}"
        if module not in done:
            for below in MAY[module].split():
                walk(below, (*above, module))
            done.add(module)

    for module in MAY:
        walk(module, ())


def test_no_cycle_between_files():
    graph = {}
    names = {".".join(("flatout", *p.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): p for p in FILES}
    for name, path in names.items():
        graph[name] = {i for i in imports(path, at_import=True) if i in names and i != name}
    state: dict[str, int] = {}

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"import cycle: {' -> '.join((*above[above.index(name) :], name))}"
        if name not in state:
            state[name] = 1
            for below in sorted(graph[name]):
                walk(below, (*above, name))
            state[name] = 2

    for name in graph:
        walk(name, ())


@pytest.mark.parametrize(("engine", "file"), [("transformers", "bench/twin.py"), ("llama_cpp", "bench/llamacpp.py")])
def test_other_engines_are_the_benchmarks_alone(engine, file):
    users = {str(p.relative_to(SRC)) for p in FILES if any(n.split(".")[0] == engine for n in imports(p))}
    assert users <= {file}
    assert not any(n.split(".")[0] == engine for p in FILES for n in imports(p, at_import=True))


# top-level packages that `import` of the named module must not load
LIGHT = {
    "flatout": {"torch", "numpy", "transformers", "tokenizers", "jinja2", "starlette", "zmq"},
    "flatout.cli": {"torch", "transformers", "tokenizers", "starlette", "zmq", "rich"},
    "flatout.cli.doctor.hardware": {"torch", "numpy"},
    "flatout.cli.doctor.url": {"torch", "numpy", "rich"},
    "flatout.doctor.probe_rules": {"torch", "numpy", "rich"},
    "flatout.cli.doctor.selfcheck": {"torch", "numpy", "tokenizers"},
    "flatout.llm": {"torch", "jinja2", "transformers", "starlette", "uvicorn", "zmq", "msgspec", "huggingface_hub", "rich"},
    "flatout.server.app": {"torch", "transformers"},
    "flatout.core.scheduler": {"torch", "transformers"},
}


@pytest.mark.parametrize("module", LIGHT)
def test_imports_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & LIGHT[module]


def test_import_takes_no_time():
    code = "import time; t = time.perf_counter(); import flatout; print(time.perf_counter() - t)"
    best = min(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(3))
    assert best < 0.15


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_house_rules(path):
    text = path.read_text()
    assert text.count("\n") <= 500, "split it by what it is about"
    head = ast.get_docstring(ast.parse(text))
    assert head, "open with what lives here, what must not, and who calls it"
    if path.name != "__init__.py":
        assert len(head.splitlines()) <= 8
    # built in pieces, so that this file is no offender itself
    workplace = re.search(r"(?<![\w.-])/(work|fa" + r"rm)/|\.lib" + r"rary/|\.\./sha" + r"red", text)
    assert not workplace, f"names a folder outside the project: {workplace}"
    for mark in ("TO" + "DO", "FIX" + "ME", "XX" + "X"):
        assert mark not in text, f"{mark}: finish it, or refuse by name"
