"""Models by name against a small hub on this machine: download, resume, revisions, files chosen, the cache offline, every failure in one line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from modelfile_samples import config_of, model_of, save, write_gguf

from flatout.modelfile.hub import choose_model
from flatout.modelfile.spec import ModelFileError

COMMIT = "a" * 40
OTHER = "b" * 40
CHILD = """
import json, sys, time
time.sleep = lambda seconds: None  # between the library's attempts
try:
    from huggingface_hub import constants
    constants.DOWNLOAD_CHUNK_SIZE = 4096  # what is lost when a connection breaks
except ImportError:
    pass
from flatout.config import ModelConfig
from flatout.modelfile.sources import resolve_model
for options in json.loads(sys.argv[1]):
    try:
        s = resolve_model(ModelConfig(**options))
        print(json.dumps({"kind": s.kind, "files": [str(f) for f in s.files], "tokenizer": str(s.tokenizer), "hidden": s.spec.hidden_size}))
    except Exception as e:
        print(json.dumps({"error": str(e), "type": type(e).__name__}))
"""


class Hub:
    """Repositories by name, each a dict of revision -> {file: bytes}. `cut`: a file's answer breaks off after so many bytes, this often."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.cut: dict[str, list[int]] = {}
        self.status: int | None = None
        self.asked: list[tuple[str, str, str | None]] = []  # method, path, Range
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path, request.headers.get("Range")))
        if self.status is not None:
            return self.reply(request, self.status, b"{}")
        if path.startswith("/api/models/"):
            return self.api(request, path.removeprefix("/api/models/"))
        repo, _, rest = path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        files = self.files(repo, revision)
        if files is None:
            return self.missing(request, repo)
        if name not in files:
            return self.reply(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        data = files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.commit(revision), "Accept-Ranges": "bytes"}
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.cut.get(name)
        if request.command == "GET" and cut:
            keep = cut.pop(0)
            request.send_response(206 if start else 200)
            for key, value in {**headers, "Content-Length": str(len(data) - start)}.items():
                request.send_header(key, value)
            request.end_headers()
            request.wfile.write(data[start : start + keep])
            request.wfile.flush()
            request.close_connection = True
            request.connection.close()
            return None
        return self.reply(request, 206 if start else 200, data[start:], headers)

    def api(self, request: BaseHTTPRequestHandler, path: str) -> None:
        for kind in ("/tree/", "/revision/", ""):
            repo, found, revision = path.partition(kind) if kind else (path, "/", "main")
            if found:
                break
        files = self.files(repo, revision or "main")
        if files is None:
            return self.missing(request, repo)
        if kind == "/tree/":
            entries = [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files.items()]
            return self.reply(request, 200, json.dumps(entries).encode())
        info = {"id": repo, "sha": self.commit(revision or "main"), "siblings": [{"rfilename": n} for n in files]}
        return self.reply(request, 200, json.dumps(info).encode())

    def commit(self, revision: str) -> str:
        return revision if revision in (COMMIT, OTHER) else OTHER if revision == "v2" else COMMIT

    def files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        revisions = self.repos.get(repo)
        name = {COMMIT: "main", OTHER: "v2"}.get(revision, revision)
        return None if revisions is None else revisions.get(name)

    def missing(self, request: BaseHTTPRequestHandler, repo: str) -> None:
        code = "RevisionNotFound" if repo in self.repos else "RepoNotFound"
        self.reply(request, 404, b'{"error": "not found"}', {"X-Error-Code": code})

    def reply(self, request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """What the repositories hold."""
    folder = tmp_path_factory.mktemp("made")
    model = model_of(config_of("llama"))
    save(model, folder / "hf", max_shard_size="60KB")
    write_gguf(model, folder / "m.gguf")
    write_gguf(model_of(config_of("llama", hidden_size=32)), folder / "n.gguf")
    return {
        "hf": {p.name: p.read_bytes() for p in (folder / "hf").iterdir()},
        "gguf": {"m.gguf": (folder / "m.gguf").read_bytes(), "n.gguf": (folder / "n.gguf").read_bytes()},
    }


@pytest.fixture
def hub(files) -> Iterator[Hub]:
    hub = Hub()
    extra = {
        "README.md": b"read",
        "tokenizer.json": b"{}",
        "original/consolidated.00.safetensors": b"x",
        "consolidated.safetensors": b"x",
        "a.bin": b"x",
    }
    two = json.loads(files["hf"]["config.json"])
    hub.repos = {
        "org/model": {
            "main": {**files["hf"], **extra},
            "v2": {**files["hf"], "config.json": json.dumps({**two, "eos_token_id": 9}).encode()},
        },
        "org/one-GGUF": {"main": {"m.gguf": files["gguf"]["m.gguf"], "README.md": b"read"}},
        "org/two-GGUF": {"main": files["gguf"]},
        "org/bin": {"main": {"config.json": files["hf"]["config.json"], "pytorch_model.bin": b"x"}},
    }
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def run(hub: Hub | None, home: Path, *calls: dict[str, Any], offline: bool = False) -> list[dict[str, Any]]:
    """resolve_model for each of the calls, in a process of its own: huggingface_hub reads its settings at import."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {
        "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(calls)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_is_fetched_once_and_served_from_the_cache_offline(hub, files, tmp_path):
    (first,) = run(hub, tmp_path, {"model": "org/model"})
    assert (first["kind"], first["hidden"]) == ("hf", 64), first
    folder = Path(first["files"][0]).parent
    assert folder.name == COMMIT and first["tokenizer"] == str(folder)
    wanted = {n for n in files["hf"] if n.endswith((".json", ".safetensors"))} | {"tokenizer.json"}
    assert {p.name for p in folder.iterdir()} == wanted
    for p in folder.glob("*.safetensors"):
        assert p.read_bytes() == files["hf"][p.name]
    hub.asked.clear()
    assert run(hub, tmp_path, {"model": "org/model"}) == [first]
    assert not [a for a in hub.asked if a[0] == "GET" and "/resolve/" in a[1]]
    hub.server.shutdown()  # from here on the hub cannot be reached
    for offline in (True, False):
        found, other = run(None, tmp_path, {"model": "org/model"}, {"model": "org/other"}, offline=offline)
        assert found == first
        why = "HF_HUB_OFFLINE is set" if offline else "Connection refused"
        assert other["type"] == "ModelFileError" and other["error"].startswith(
            "org/other: not in the hub cache, and the hub cannot be reached ("
        )
        assert why in other["error"] and "\n" not in other["error"]


def test_revisions_download_dir_and_names_that_are_not_there(hub, tmp_path):
    pinned, commit, wrong, nothing, elsewhere = run(
        hub,
        tmp_path,
        {"model": "org/model", "revision": "v2"},
        {"model": "org/model", "revision": OTHER},
        {"model": "org/model", "revision": "v9"},
        {"model": "org/nothing"},
        {"model": "org/model", "download_dir": str(tmp_path / "there")},
    )
    assert Path(pinned["files"][0]).parent.name == OTHER and commit["files"] == pinned["files"]
    assert wrong == {"error": "org/model: has no revision 'v9'; see --revision", "type": "ModelFileError"}
    assert nothing["error"].startswith("org/nothing: the hub has no such model, or it is private") and nothing["type"] == "ModelFileError"
    assert elsewhere["files"][0].startswith(str(tmp_path / "there"))


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub, files, tmp_path):
    name = sorted(n for n in files["hf"] if n.endswith(".safetensors"))[0]
    size = len(files["hf"][name])
    hub.cut[name] = [size // 2]
    (found,) = run(hub, tmp_path, {"model": "org/model"})
    assert found.get("kind") == "hf", found
    assert Path(found["files"][0]).read_bytes() == files["hf"][name]
    ranges = [r for method, path, r in hub.asked if method == "GET" and path.endswith(name)]
    assert len(ranges) == 2 and ranges[1] is not None
    assert size // 4 < int(ranges[1].removeprefix("bytes=").split("-")[0]) <= size // 2


def test_a_download_that_never_ends_is_told_and_the_next_run_keeps_what_is_whole(hub, files, tmp_path):
    name = sorted(n for n in files["hf"] if n.endswith(".safetensors"))[0]
    size = len(files["hf"][name])
    hub.cut[name] = [size // 3, *[0] * 9]
    (broken,) = run(hub, tmp_path, {"model": "org/model"})
    assert broken["type"] == "ModelFileError" and "\n" not in broken["error"], broken
    assert broken["error"].startswith("org/model: the download broke off (") and broken["error"].endswith("run again, whole files are kept")
    (half,) = run(None, tmp_path, {"model": "org/model"}, offline=True)
    assert half["type"] == "ModelFileError" and ("not in the hub cache" in half["error"] or f"{name} is missing" in half["error"]), half
    hub.cut.clear()
    hub.asked.clear()
    (found,) = run(hub, tmp_path, {"model": "org/model"})
    assert Path(found["files"][0]).read_bytes() == files["hf"][name]
    assert [path.split("/")[-1] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path] == [name]


def test_a_hub_in_trouble_is_told_in_one_line(hub, tmp_path):
    hub.status = 403
    (found,) = run(hub, tmp_path, {"model": "org/model"})
    assert found["type"] == "ModelFileError" and "\n" not in found["error"]
    assert found["error"].startswith("org/model: not in the hub cache, and the hub cannot be reached (it answered 403)")


def test_gguf_repositories(hub, files, tmp_path):
    one, several, named, absent, plain, dummy = run(
        hub,
        tmp_path,
        {"model": "org/one-GGUF"},
        {"model": "org/two-GGUF"},
        {"model": "org/two-GGUF:n.gguf"},
        {"model": "org/two-GGUF:x.gguf"},
        {"model": "org/bin"},
        {"model": "org/bin", "load_format": "dummy"},
    )
    assert (one["kind"], Path(one["files"][0]).read_bytes()) == ("gguf", files["gguf"]["m.gguf"])
    assert several["error"] == "org/two-GGUF: holds several GGUF files; name one, as in org/two-GGUF:m.gguf (m.gguf, n.gguf)"
    assert (named["kind"], named["hidden"]) == ("gguf", 32)
    assert not list(tmp_path.rglob("models--org--two-GGUF/**/m.gguf"))
    assert absent["error"] == "org/two-GGUF: has no file 'x.gguf'; its GGUF files: m.gguf, n.gguf"
    assert plain["error"] == "org/bin: holds no safetensors or GGUF weights"
    assert dummy["kind"] == "dummy"
    hub.server.shutdown()
    again, other = run(None, tmp_path, {"model": "org/one-GGUF"}, {"model": "org/two-GGUF:n.gguf"}, offline=True)
    assert (again, other) == (one, named)


def test_without_huggingface_hub_the_mend_is_named(tmp_path):
    code = "import sys; sys.modules['huggingface_hub'] = None\n" + CHILD
    done = subprocess.run([sys.executable, "-c", code, '[{"model": "org/model"}]'], capture_output=True, text=True, check=True)
    assert "pip install 'flatout[hub]'" in json.loads(done.stdout)["error"]


def test_files_chosen_from_a_repository():
    def pick(*files: str, load_format: str = "auto", gguf: str | None = None) -> list[str]:
        return choose_model(list(files), "o/r", load_format, gguf)

    assert pick("config.json", "model.safetensors", "extra.safetensors") == ["config.json", "model.safetensors"]
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    assert set(pick(*shards, "sub/x.safetensors", "consolidated.safetensors")) == set(shards)
    split = ("q-00001-of-00002.gguf", "q-00002-of-00002.gguf")
    assert pick(*split) == list(split) and pick(*split, "z.gguf", gguf=split[1]) == list(split)
    assert pick("a.gguf", "model.safetensors", "config.json", load_format="gguf") == ["a.gguf"]
    with pytest.raises(ModelFileError, match="holds no safetensors weights"):
        pick("a.gguf", load_format="safetensors")
