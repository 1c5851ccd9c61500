"""A name becomes a folder: itself, a cached snapshot, or a download of exactly what loading needs."""

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

import pytest

from airllm.errors import CheckpointError
from airllm.locate import locate, wanted_files

SHA = "0123456789abcdef0123456789abcdef01234567"
SMALL = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "README.md",
         "modeling_x.py", "image.png", "onnx/model.safetensors", "additional_chat_templates/tool.jinja"]  # fmt: skip
KEPT = {"config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja",
        "additional_chat_templates/tool.jinja"}  # fmt: skip


def make_cache(cache: Path, name: str, files: list[str], revision: str = "main") -> Path:
    """A hub cache as the hub client lays it out, with the given files of one repository."""
    repo = cache / ("models--" + name.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / revision).write_text(SHA)
    snapshot = repo / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/model").resolve() == tmp_path / "org" / "model"  # a folder here wins over a hub id
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/org") == tmp_path / "org"


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./x/y", "a/b/c", "a//b", "../up", "a--b/c", "org/mo del", "-x"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_without_a_network(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder here nor a hub id"):
        locate(name)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match="is a file: give the folder"):
        locate(tmp_path / "model.safetensors")


def test_a_cached_snapshot_is_found_offline(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path, "org/model", ["config.json", "model.safetensors"])
    assert locate("org/model", cache_dir=tmp_path, local_files_only=True) == snapshot
    assert locate("org/model", cache_dir=tmp_path, local_files_only=True, revision=SHA) == snapshot


def test_what_is_not_cached_is_named_with_its_revision(tmp_path: Path) -> None:
    make_cache(tmp_path, "org/model", ["config.json"])
    for name, revision in (("org/other", None), ("org/model", "v2")):
        with pytest.raises(CheckpointError, match=rf"{name} \(revision {revision or 'main'}\) is not in"):
            locate(name, cache_dir=tmp_path, local_files_only=True, revision=revision)


def test_without_a_network_the_cache_is_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = make_cache(tmp_path, "org/model", ["config.json"])  # the suite runs with HF_HUB_OFFLINE=1
    assert locate("org/model", cache_dir=tmp_path) == snapshot
    assert "using the cached copy" in caplog.text
    with pytest.raises(CheckpointError, match="is not cached, and the hub did not give it"):
        locate("org/other", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
          "consolidated.safetensors", "pytorch_model-00001-of-00001.bin"],
         ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]),
        (["odd.safetensors", "model.safetensors.index.json", "pytorch_model.bin"],
         ["odd.safetensors", "model.safetensors.index.json"]),
        (["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "training_args.bin", "flax_model.msgpack"],
         ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]),
        (["pytorch_model.bin", "adapter.safetensors"], ["pytorch_model.bin"]),
    ],
)  # fmt: skip
def test_one_set_of_weights_is_chosen_and_no_duplicate(weights: list[str], taken: list[str]) -> None:
    assert set(wanted_files(SMALL + weights)) == KEPT | set(taken)


def test_without_weights_only_the_small_files_come() -> None:
    names = [*SMALL, "model.safetensors", "pytorch_model.bin"]
    assert set(wanted_files(names, weights=False)) == KEPT


def test_python_files_come_only_when_trusted() -> None:
    assert "modeling_x.py" not in wanted_files(SMALL)
    assert "modeling_x.py" in wanted_files(SMALL, trust_remote_code=True)


class FakeHub(BaseHTTPRequestHandler):
    """Just enough of the hub for its client: one repository, its tree, and its files."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/model/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.files.items()]  # fmt: skip
            self._send(json.dumps(tree).encode(), body)
        elif path in ("/api/models/org/model", "/api/models/org/model/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            self._send(json.dumps({"id": "org/model", "sha": SHA, "siblings": siblings}).encode(), body)
        elif path.startswith("/api/models/org/model/revision/"):
            self._send(b"{}", body, 404, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/org/model/resolve/") and path.split("/", 5)[5] in self.files:
            data = self.files[path.split("/", 5)[5]]
            if body:
                self.asked.append(path.split("/", 5)[5])
            self._send(data, body, 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA})
        else:
            self._send(b"{}", body, 404, {"X-Error-Code": "RepoNotFound"})

    def _send(self, data: bytes, body: bool, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def fake_hub() -> Iterator[str]:
    FakeHub.files = {name: name.encode() for name in (*SMALL, "model.safetensors", "pytorch_model.bin")}
    FakeHub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_hub_id_is_downloaded_once_with_the_real_client(tmp_path: Path, fake_hub: str) -> None:
    script = (
        "import sys\nfrom airllm.locate import locate\nfrom airllm.errors import CheckpointError\n"
        "for name, options in (('org/model', {}), ('org/model', {}), ('org/model', {'local_files_only': True}),\n"
        "                      ('org/model', {'revision': 'v9'}), ('org/none', {})):\n"
        "    try:\n        print(locate(name, cache_dir=sys.argv[1], **options))\n"
        "    except CheckpointError as error:\n        print('refused:', str(error).replace('\\n', ' '))\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": fake_hub, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    root = str(Path(__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, cwd=root, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert len(lines) == 5, result.stderr
    folder = Path(lines[0])
    assert lines[:3] == [lines[0]] * 3 and folder.name == SHA
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == KEPT | {
        "model.safetensors"
    }
    assert (folder / "model.safetensors").read_text() == "model.safetensors"
    assert sorted(FakeHub.asked) == sorted(KEPT | {"model.safetensors"})  # each file once, over both calls
    assert "no revision 'v9'" in lines[3]
    assert "org/none is no folder here, is not cached" in lines[4] and "hf_token" in lines[4]
