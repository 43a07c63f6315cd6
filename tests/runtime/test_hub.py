"""Models by name: paths never leave the machine, the cache is enough where it is whole, and an absent hub costs seconds.

The hub is a small server in this process; what asks it is a process of its own, since huggingface_hub reads its environment once.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from jax_ppo.models import hf
from jax_ppo.runtime import hub
from jax_ppo.types import InputError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "qwen2_tied"
NAME, REVISION = "owner/tiny-model", "0123456789" * 4


def refusal(path: str) -> str:
    with pytest.raises(InputError) as caught:
        hub.model_directory(path, flag="config.model.path")
    message = str(caught.value)
    assert message.startswith(f"config.model.path={path!r}: ")
    assert "\n" not in message
    return message


# --- Paths ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("asked the hub"))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "path",
    [
        "/no/such/model",
        "./model",
        "../owner/model",
        "~/owner/model",
        "~nobody-of-that-name/model",
        ".",
        "a/b/c",
        "model",
        "",
        "a/b/",
    ],
)
def test_what_looks_like_a_path_stays_here(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    if path == ".":
        assert hub.model_directory(path, flag="config.model.path") == Path(".")
    else:
        assert "no such directory, and not a hub id" in refusal(path)


@pytest.mark.usefixtures("no_hub")
def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it could be a hub id, and also where it is a file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "owner" / "model.safetensors").touch()
    for path in ("owner/model", "~/owner/model", str(tmp_path / "owner" / "model")):
        assert hub.model_directory(path, flag="config.model.path").samefile(tmp_path / "owner" / "model")
    assert "is a file; give the directory it lies in" in refusal("owner/model.safetensors")


def test_what_cannot_be_a_hub_id() -> None:
    for path in ("owner/a model", "owner/model--x", "owner/mo:del", "-owner/model."):
        assert "not a hub id" in refusal(path)


# --- The cache, without a network -----------------------------------------------------------------------------------------


def fill_cache(home: Path, files: list[Path]) -> Path:
    """A snapshot as huggingface_hub leaves it: blobs, links to them, and the revision that `main` is."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for number, file in enumerate(files):
        shutil.copyfile(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of huggingface_hub for this process, which is offline."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_cached_snapshot_is_enough(cache: Path) -> None:
    snapshot = fill_cache(cache, [GOLDEN / "config.json", GOLDEN / "model.safetensors"])
    directory = hub.model_directory(NAME, flag="config.model.path")
    assert directory == snapshot
    hf.check_params(directory, hf.load_config(directory))


@pytest.mark.parametrize("key", ["model.path", "critic.path"])
def test_offline_without_a_cache(cache: Path, key: str) -> None:
    with pytest.raises(InputError) as caught:
        hub.model_directory(NAME, flag=f"config.{key}")
    message = str(caught.value)
    assert message.startswith(
        f"config.{key}='{NAME}': not in the local cache and the hub cannot be reached (OfflineModeIsEnabled: "
    )
    assert message.endswith(f"; give a local directory instead: --config.{key}=DIR")
    assert "\n" not in message


def test_offline_with_a_part_of_it(cache: Path) -> None:
    """Loading a tokenizer leaves a snapshot without weights, which huggingface_hub takes for the model."""
    fill_cache(cache, [GOLDEN / "config.json"])
    assert "only a part is in the local cache and the hub cannot be reached" in refusal(NAME)


# --- A hub ----------------------------------------------------------------------------------------------------------------


# What the repository has, of which weights for PyTorch and a read-me are not wanted.
FILES = {name: (GOLDEN / name).stat().st_size for name in ("config.json", "model.safetensors")} | {
    "pytorch_model.bin": 9,
    "README.md": 9,
}


def oid(file: str) -> str:
    return hashlib.sha1(file.encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """Answers for one model as the hub does, or with one error for everything.

    asked: the paths that were asked for.
    """

    daemon_threads = True

    def __init__(self, status: int = 200, reason: str = ""):
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.reason, self.asked = status, reason, list[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        status, body, headers = self.answer() if self.server.status == 200 else self.error(self.server.status, self.server.reason)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def answer(self) -> tuple[int, bytes, dict[str, str]]:
        path, _, _ = self.path.partition("?")
        file = path.removeprefix(f"/{NAME}/resolve/{REVISION}/")
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [{"type": "file", "path": name, "size": size, "oid": oid(name)} for name, size in FILES.items()]
            return 200, json.dumps(listed).encode(), {}
        if path.startswith(f"/api/models/{NAME}"):
            listed = [{"rfilename": name} for name in FILES]
            return 200, json.dumps({"id": NAME, "modelId": NAME, "sha": REVISION, "siblings": listed}).encode(), {}
        if file in FILES:
            return 200, (GOLDEN / file).read_bytes(), {"ETag": f'"{oid(file)}"', "X-Repo-Commit": REVISION}
        return self.error(404, "EntryNotFound")

    def error(self, status: int, reason: str) -> tuple[int, bytes, dict[str, str]]:
        return status, b"", {"X-Error-Code": reason, "X-Error-Message": reason}

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def online(tmp_path: Path) -> Iterator:
    """Asks for the model in a process that may use a network, which is the address given; returns what it says, and how long it took."""
    servers = []

    def ask(server: Hub | str) -> tuple[str, float]:
        if isinstance(server, Hub):
            servers.append(server)
            server = f"http://127.0.0.1:{server.server_address[1]}"
        program = (
            "from jax_ppo.runtime import hub; from jax_ppo.types import InputError\n"
            f"try: print(hub.model_directory({NAME!r}, flag='config.model.path'))\n"
            "except InputError as error: print(error)"
        )
        home = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": server, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        unset = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and not name.startswith("HF_")}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=unset | home,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n"), time.monotonic() - began

    yield ask
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_download(online, tmp_path: Path) -> None:
    """With the files that are wanted and no others, into the cache: the second time nothing is asked."""
    server = Hub()
    directory, _ = online(server)
    assert {file.name for file in Path(directory).iterdir()} == {"config.json", "model.safetensors"}
    assert tmp_path in Path(directory).parents
    assert (Path(directory) / "model.safetensors").read_bytes() == (GOLDEN / "model.safetensors").read_bytes()
    hf.check_params(directory, hf.load_config(directory))
    asked = len(server.asked)
    assert online(server)[0] == directory
    assert len(server.asked) == asked


def test_a_part_in_the_cache_is_completed(online, tmp_path: Path) -> None:
    snapshot = fill_cache(tmp_path, [GOLDEN / "config.json"])
    assert online(Hub())[0] == str(snapshot)
    hf.check_params(snapshot, hf.load_config(snapshot))


def test_no_hub(online) -> None:
    """Nothing listens on that port."""
    message, seconds = online("http://127.0.0.1:9")
    assert message.startswith(f"config.model.path='{NAME}': not in the local cache and the hub cannot be reached (ConnectError: ")
    assert message.endswith("; give a local directory instead: --config.model.path=DIR")
    assert "\n" not in message
    assert seconds < 60, "most of it is the start of Python on a busy machine"


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (404, "RepoNotFound", "the hub has no such model, or it is private"),
        (401, "GatedRepo", "private"),
        (403, "Forbidden", "the hub refused (403"),
    ],
)
def test_a_hub_that_refuses(online, status: int, reason: str, words: str) -> None:
    message, _ = online(Hub(status, reason))
    assert message.startswith(f"config.model.path='{NAME}': ")
    assert words in message
    assert "\n" not in message
    assert message.endswith("give a local directory instead: --config.model.path=DIR")
