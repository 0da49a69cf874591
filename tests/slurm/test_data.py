"""If this fails, a corpus built on a cluster is not the one that a single machine would have built."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import yaml

from data_pipeline.build import build
from tests.corpus_fixtures import config, digests, write_corpus
from tests.slurm.namespaces import process_ids
from tests.slurm.site import Site

DATA = str(Path(__file__).parents[2] / "slurm" / "data.sh")


def submit_build(site: Site, *command: str) -> list[str]:
    result = site.command(*command)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.rpartition("scancel ")[2].split()


def python_of(job: str, task: int) -> list[int]:
    """The process of a running array task, by what Slurm wrote into its environment."""
    wanted = {f"SLURM_ARRAY_JOB_ID={job}", f"SLURM_ARRAY_TASK_ID={task}"}
    found = []
    for pid in process_ids():
        with contextlib.suppress(OSError):
            program, *words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            if "python" in program and "submitit.core._submit" in words and wanted <= set(environ):
                found.append(pid)
    return found


def kill(site: Site, job: str, task: int) -> None:
    """SIGKILL to a task as soon as there is one."""
    found: list[int] = []
    site.wait_until(f"task {task} of job {job}", lambda: found.extend(python_of(job, task)) or found, 120)
    os.kill(found[0], signal.SIGKILL)


def test_any_number_of_tasks_on_two_nodes_build_the_same_bytes(make_site: Callable[[str], Site], tmp_path: Path) -> None:
    """1, 2 and 4 array tasks, of which one is killed and started again."""
    corpus = write_corpus(tmp_path / "corpus")
    settings = config(corpus, tmp_path / "data")
    sites, jobs = {}, {}
    for tasks in (4, 2, 1):
        site = sites[tasks] = make_site(f"data{tasks}")
        own = settings.model_copy(update={"output": str(site.folder / "data")})
        (site.folder / "data.yaml").write_text(yaml.safe_dump(own.model_dump(mode="json", exclude_unset=True)))
        command = ("bash", DATA) if tasks == 2 else ("mlite", "data", "build", "--slurm")
        half = "cluster.sbatch_args=[--mincpus=2]"  # of a node's CPUs, so that four tasks take two nodes
        jobs[tasks] = submit_build(site, *command, "data.yaml", "--tasks", str(tasks), half)
        if tasks == 4:
            kill(site, jobs[4][0], 1)
    expected = digests(build(settings, quiet=True).path)
    for tasks, (*_, last) in jobs.items():
        assert sites[tasks].wait_for_end(last, 300)["JobState"] == "COMPLETED", sites[tasks].outputs()
        assert digests(sites[tasks].folder / "data") == expected
    tasks_read = [sites[4].job(f"{jobs[4][0]}_{task}") for task in range(4)]
    assert int(tasks_read[1]["Restarts"]) >= 1
    assert {facts["NodeList"] for facts in tasks_read} == {"node1", "node2"}
