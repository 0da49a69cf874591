"""If this fails, a build that was killed, or that had other workers, ends with another dataset."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.corpus_fixtures import config, digests, write_corpus
from tests.paths import ROOT

MLITE = [sys.executable, "-m", "launcher.cli"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

# Starts the build over and over, each time killed at its first rename, before it or after it; once that gets it no
# further, at its second, and so on until one gets to the end. So it is killed at every rename once. Prints how often.
# Each start is a fork of a process that has imported everything and started no thread.
KILLED_AT_EACH_RENAME = """
import os, signal, sys
from data_pipeline.build import build
from data_pipeline.config import load_data_config
config, when = load_data_config(sys.argv[1]), sys.argv[2]
number, seen, finished = 1, 0, None
def killing(real):
    def rename(*arguments, **more):
        global seen
        seen += 1
        if seen == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments, **more)
        if seen == number and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
    return rename
for kills in range(100):
    child = os.fork()
    if child == 0:
        os.replace, os.rename = killing(os.replace), killing(os.rename)
        build(config, quiet=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    before, finished = finished, sorted(path.name for path in config.work_folder.rglob("*") if ".tmp-" not in path.name)
    number += finished == before
print(kills)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), size=150)


def config_file(corpus: Path, folder: Path, **more: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config(corpus, folder / "data", **more).model_dump(mode="json", exclude_unset=True)))
    return path


def mlite(*words: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MLITE, *map(str, words)], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=timeout_s)


@pytest.fixture(scope="module")
def wanted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed build with one worker makes."""
    folder = tmp_path_factory.mktemp("wanted")
    done = mlite("data", "build", config_file(corpus, folder), "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    return digests(folder / "data")


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_makes_the_same_bytes(corpus: Path, wanted: dict[str, str], tmp_path: Path, workers: int) -> None:
    done = mlite("data", "build", config_file(corpus, tmp_path), f"workers={workers}")
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "data") == wanted
    assert "is ready after" in done.stderr and "encode:" in done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_rename_in_turn_it_still_ends_with_the_same_bytes(
    corpus: Path, wanted: dict[str, str], tmp_path: Path, when: str
) -> None:
    path = config_file(corpus, tmp_path)
    command = [sys.executable, "-c", KILLED_AT_EACH_RENAME, str(path), when]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 15
    assert digests(tmp_path / "data") == wanted
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.yaml", "data", "data.work"]
    assert not list((tmp_path / "data.work").rglob("*.tmp-*"))


def test_killed_at_random_moments_with_other_workers_each_time(corpus: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    """B016: the workers of a killed build go with it, and what they left is never mixed in."""
    path = config_file(corpus, tmp_path)
    dice = random.Random(7)
    start = time.monotonic()
    assert mlite("data", "build", config_file(corpus, _made(tmp_path / "timed")), "workers=2", "--quiet").returncode == 0
    whole_s = time.monotonic() - start
    for kill in range(6):
        command = [*MLITE, "data", "build", str(path), f"workers={dice.choice([1, 2, 3])}", "--quiet"]
        with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.wait(timeout=whole_s * dice.uniform(0.3, 1.0)) == 0, process.communicate()[1]
            except subprocess.TimeoutExpired:
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                _, alive = psutil.wait_procs(family, timeout=30)
                assert not alive, f"kill {kill}: workers outlived their parent"
    assert mlite("data", "build", path, "workers=2", "--quiet").returncode == 0
    assert digests(tmp_path / "data") == wanted


# A build that stands still at the first rename while it has workers, so that a signal is sure to come before its end.
STANDING_STILL = """
import os, signal, sys, time
import psutil
from launcher.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job hands on an ignored one
real = os.replace
def standing(*arguments, **more):
    if psutil.Process().children():
        print("standing", flush=True)
        time.sleep(60)
    real(*arguments, **more)
os.replace = standing
sys.argv = ["mlite", "data", "build", sys.argv[1], "workers=2", "--quiet"]
main()
"""


def test_ctrl_c_ends_the_workers_and_the_same_command_goes_on(corpus: Path, wanted: dict[str, str], tmp_path: Path) -> None:
    path = config_file(corpus, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", STANDING_STILL, str(path)],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and select.select([process.stdout], [], [], 120)[0] and process.stdout.readline() == b"standing\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert mlite("data", "build", path, "workers=2", "--quiet").returncode == 0
    assert digests(tmp_path / "data") == wanted


def test_the_other_commands_on_a_dataset(corpus: Path, tmp_path: Path) -> None:
    path = config_file(corpus, tmp_path, packing=[])
    folder = tmp_path / "data"
    assert mlite("data", "build", "--config", path, "--quiet").returncode == 0
    packed = mlite("data", "pack", folder, "--sequence-length", "64", "--method", "concat")
    assert packed.returncode == 0 and "web train, S=64, concat:" in packed.stdout
    shown = mlite("data", "inspect", folder, "-n", "1")
    assert shown.returncode == 0 and "exact duplicate" in shown.stdout and "--- web train 0:" in shown.stdout
    traced = mlite("data", "trace", folder, "--sample", "5", "--position", "3", "-s", "64", "--method", "concat")
    origin = json.loads(traced.stdout)
    found = mlite("data", "trace", folder, "--document", origin["document"], "-s", "64", "--method", "concat")
    assert 5 in [json.loads(line)["sample"] for line in found.stdout.splitlines()]
    whole = mlite("data", "inspect", folder, "--document", origin["document"])
    assert origin["token"] in whole.stdout
    assert mlite("data", "verify", folder).returncode == 0
    shard = folder / "shards" / "web-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[-200] ^= 1
    shard.write_bytes(raw)
    damaged = mlite("data", "verify", folder)
    assert damaged.returncode == 3 and "web-00000.bin" in damaged.stderr and "Traceback" not in damaged.stderr


def test_mistakes_end_with_code_2_and_a_sentence(tmp_path: Path) -> None:
    for words, said in (
        (("data", "build"), "the path of one data config"),
        (("data", "build", tmp_path / "no.yaml"), "no.yaml"),
        (("data", "pack", tmp_path), "--sequence-length"),
        (("data", "trace", tmp_path, "--sample", "1"), "--sequence-length"),
    ):
        done = mlite(*words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    done = mlite("data", "verify", tmp_path)
    assert done.returncode == 3 and "is not a dataset" in done.stderr


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
