"""`onekv models` as a person meets it, on caches that lie as the Hugging Face hub's library and OneKV lay them out."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

sys.path.insert(0, str(Path(__file__).parent / "models"))

from test_loader import make_folder

from hub import COMMIT, WEIGHTS, Hub, serving
from onekv.bench.soak import save_tiny
from terminal import Terminal

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def add_to_hub(home: Path, name: str, source: Path) -> Path:
    """A model as the hub's library keeps it: the snapshot has links to the files. Gives its folder."""
    commit = "0" * 40
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for file in source.iterdir():
        shutil.copy(file, folder / "blobs" / file.name)
        (folder / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    make_folder(folder, bits=4)
    return folder


@pytest.fixture
def home(tmp_path: Path, tiny: Path, smollm2_path: Path) -> Path:
    """Both caches: the default model, one from the hub, and one whose download was interrupted."""
    (tmp_path / "onekv" / "models").mkdir(parents=True)
    (tmp_path / "onekv" / "models" / GGUF).symlink_to(smollm2_path)
    add_to_hub(tmp_path, "some-org/tiny-4bit", tiny)
    begun = add_to_hub(tmp_path, "some-org/begun", tiny)
    for file in begun.rglob("model.safetensors"):
        file.unlink()
    (begun / "blobs" / "abc.incomplete").write_bytes(bytes(5000))
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The real command, because the hub's library reads its settings at import; nothing outside can be reached."""
    nowhere = "http://127.0.0.1:9"
    variables = os.environ | {
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": nowhere,
        "ONEKV_CACHE_DIR": str(tmp_path / "onekv"),
        "ONEKV_INDEX_URL": nowhere,
    }

    def run(*words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "onekv", "models", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, input=given, env=variables)
        assert "Traceback" not in done.stderr
        return done

    return run


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("onekv: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# Looking


def test_ls_lists_both_caches(run: Run, home: Path) -> None:
    done = run("ls")
    assert (done.returncode, done.stderr) == (0, "")
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert list(table)[2:-1] == ["smollm2-135m", "some-org/begun", "some-org/tiny-4bit"]
    assert table["smollm2-135m"][1:6] == ["llama", "Q4_1", "8,192", "93.81", "MiB"]
    assert table["smollm2-135m"][-1] == "OneKV's"
    assert table["some-org/tiny-4bit"][1:3] == ["llama", "4-bit"]
    assert table["some-org/tiny-4bit"][-2:] == ["Hugging", "Face's"]
    assert table["some-org/begun"][1:3] == ["-", "incomplete"]
    listed = {each["name"]: each for each in json.loads(run("ls", "--json").stdout)}
    tiny, begun = listed["some-org/tiny-4bit"], listed["some-org/begun"]
    blobs = home / "hub" / "models--some-org--tiny-4bit" / "blobs"
    assert tiny["bytes"] == sum(file.stat().st_size for file in blobs.iterdir())
    assert (tiny["format"], tiny["complete"], tiny["problem"]) == ("safetensors", True, None)
    assert Path(tiny["path"]) == home / "hub" / "models--some-org--tiny-4bit" / "snapshots" / ("0" * 40)
    assert begun["complete"] is False and "onekv models pull some-org/begun resumes" in begun["problem"]


def test_ls_of_nothing_and_of_what_cannot_be_read(run: Run, tmp_path: Path) -> None:
    assert run("ls").stdout == "there are no models in the caches; onekv models pull NAME downloads one\n"
    assert json.loads(run("ls", "--json").stdout) == []
    (tmp_path / "onekv" / "models").mkdir(exist_ok=True)
    (tmp_path / "onekv" / "models" / "notes.gguf").write_bytes(b"no model")
    (tmp_path / "onekv" / "models" / f"{GGUF}.part").write_bytes(bytes(2048))
    (tmp_path / "hub" / "models--a--broken").mkdir(parents=True)
    done = run("ls")
    assert done.returncode == 0 and "notes.gguf" in done.stdout
    (begun,) = [line.split() for line in done.stdout.splitlines() if line.startswith("smollm2-135m")]
    assert begun[1:6] == ["-", "incomplete", "-", "2.00", "KiB"]
    assert done.stderr.startswith("onekv: left out: ") and "models--a--broken" in done.stderr


def test_ls_and_rm_import_no_mlx(home: Path) -> None:
    code = (
        "import sys; from onekv.cli import main\n"
        "assert main(['models', 'ls']) == 0 and main(['models', 'rm', 'smollm2-135m', '--yes']) == 0\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)"
    )
    variables = os.environ | {"HF_HOME": str(home), "ONEKV_CACHE_DIR": str(home / "onekv")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr


def test_show_has_the_kv_memory_that_would_fit(run: Run, home: Path, tiny: Path) -> None:
    done = run("show", "smollm2-135m")
    assert done.returncode == 0, done.stderr
    assert "\ncontext            8,192 tokens\n" in done.stdout and "\nKV memory here     " in done.stdout
    found = json.loads(run("show", "some-org/tiny-4bit", "--json").stdout)
    assert (found["quantization"], found["cache"], found["plan"]["problem"]) == ("4-bit", "huggingface", None)
    assert 0 < found["plan"]["kv"] < found["plan"]["available"] and found["plan"]["longest"] > 0
    own = json.loads(run("show", str(tiny), "--json").stdout)
    assert (own["name"], own["cache"], own["plan"]["weights"]) == ("tiny", None, found["plan"]["weights"])


@pytest.mark.parametrize("action", ["show", "rm"])
def test_a_name_that_is_not_there_suggests_a_near_one(run: Run, home: Path, action: str) -> None:
    assert "did you mean some-org/tiny-4bit?" in refused(run(action, "some-org/tiny-4bits"))


# Fetching


def test_pull_of_what_is_there(run: Run, home: Path, tiny: Path) -> None:
    done = run("pull", "smollm2-135m")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "smollm2-135m is available")
    done = run("pull", "some-org/tiny-4bit")
    assert done.returncode == 0 and "of weights in" in done.stdout, done.stderr
    assert "there is nothing to download" in refused(run("pull", str(tiny)))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are larger than what the hub's library writes at once."""
    return Path(save_tiny(tmp_path_factory.mktemp("large") / "tiny"))


@pytest.fixture
def hub(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(large, "some-org/large")) as hub:
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "ONEKV_CACHE_DIR": str(tmp_path / "onekv"),
            "HF_TOKEN": "hf_of_the_tests",
        }.items():
            monkeypatch.setenv(name, value)
        yield hub


def blobs(home: Path) -> Path:
    return home / "hub" / "models--some-org--large" / "blobs"


def snapshot(home: Path) -> Path:
    return blobs(home).parent / "snapshots" / COMMIT


def onekv(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "onekv", "models", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_pull_that_was_interrupted_goes_on_where_it_stopped(
    hub: Hub, large: Path, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    hub.hold.set()
    command = terminal(sys.executable, "-m", "onekv", "models", "pull", hub.name)
    size = (large / WEIGHTS).stat().st_size
    deadline = time.monotonic() + 120
    while sum(file.stat().st_size for file in blobs(tmp_path).glob("*.incomplete")) < size // 2:
        assert time.monotonic() < deadline and command.isalive(), command.seen.getvalue()
        time.sleep(0.05)
    command.sendintr()
    assert command.end() == 130
    assert "model.safetensors:  50%" in command.seen.getvalue() and "onekv: interrupted" in command.seen.getvalue()
    (row,) = [line.split() for line in onekv("ls").stdout.splitlines() if line.startswith(hub.name)]
    assert row[1:3] == ["-", "incomplete"]
    hub.hold.clear()
    done = onekv("pull", hub.name)
    assert done.returncode == 0 and done.stdout.startswith("some-org/large is available: 31.51 MiB"), done.stderr
    assert hub.ranges == ["bytes=0-", f"bytes={size // 2}-"]
    assert hub.keys == {"Bearer hf_of_the_tests"}
    for file in large.iterdir():
        assert (snapshot(tmp_path) / file.name).read_bytes() == file.read_bytes(), file
    assert not list(blobs(tmp_path).glob("*.incomplete"))
    assert onekv("pull", hub.name).returncode == 0 and len(hub.ranges) == 2, "nothing is left to download"


def test_a_pull_does_not_go_on_from_something_else(hub: Hub, large: Path, tmp_path: Path) -> None:
    """Which its checksum tells: the file is begun anew."""
    content = (large / WEIGHTS).read_bytes()
    part = blobs(tmp_path) / f"{hashlib.sha256(content).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    done = onekv("pull", hub.name)
    assert done.returncode == 0, done.stderr
    assert hub.ranges == ["bytes=1000-", None] and not part.exists()
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == content


def test_pull_where_nothing_can_be_reached(run: Run, home: Path) -> None:
    (home / "onekv" / "models" / GGUF).unlink()
    assert "could not be downloaded from 127.0.0.1; check the network" in refused(run("pull", "smollm2-135m"))
    assert "the Hugging Face hub cannot be reached" in refused(run("pull", "some-org/other"))
    assert "model.safetensors is missing; if its download was interrupted" in refused(run("pull", "some-org/begun"))
    assert "did you mean smollm2-135m?" in refused(run("pull", "smollm2"))


# Removing


def test_rm_asks_first(run: Run, home: Path) -> None:
    folder = home / "hub" / "models--some-org--tiny-4bit"
    for answer in ("", "n\n"):
        done = run("rm", "some-org/tiny-4bit", given=answer)
        assert done.returncode == 1 and done.stdout.endswith("nothing was removed\n") and folder.exists()
    done = run("rm", "some-org/tiny-4bit", given="y\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "from Hugging Face's cache? [y/N] some-org/tiny-4bit was removed; " in done.stdout
    assert not folder.exists() and (home / "hub" / "models--some-org--begun").exists()


def test_rm_without_asking(run: Run, home: Path) -> None:
    done = run("rm", "smollm2-135m", "--yes")
    assert (done.returncode, done.stdout) == (0, "smollm2-135m was removed; 93.81 MiB freed\n")
    assert not list((home / "onekv" / "models").glob("*.gguf*[!k]"))
    assert run("rm", "some-org/begun", "--yes").returncode == 0
    assert not (home / "hub" / "models--some-org--begun").exists()


def test_rm_leaves_alone_what_is_not_its_own(run: Run, home: Path, tiny: Path) -> None:
    assert "is not in a model cache" in refused(run("rm", str(tiny), "--yes"))
    assert (tiny / "config.json").exists()
    file = home / "onekv" / "models" / GGUF
    with filelock.FileLock(f"{file}.lock"):
        assert "another process is downloading" in refused(run("rm", "smollm2-135m", "--yes"))
    assert file.exists()
