"""`mlite doctor`: what is right and what is wrong with this machine, each fault with its remedy."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

Grade = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    grade: Grade
    what: str
    remedy: str = ""


def examine() -> int:
    """Print every finding; 0 unless something is wrong, then 1."""
    findings = [finding for check in CHECKS for finding in check()]
    for finding in findings:
        print(f"{finding.grade:>5}  {finding.what}" + (f"\n       -> {finding.remedy}" if finding.remedy else ""))
    wrong = sum(finding.grade == "wrong" for finding in findings)
    print(f"{wrong} wrong" if wrong else "nothing is wrong: this machine can train")
    return 1 if wrong else 0


def check_python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", f"Python {found} at {sys.executable}")
    if not sys.platform.startswith("linux"):
        yield Finding("note", f"{sys.platform}: a dead launcher is not noticed here", "on Linux it is; everything else works")


def check_packages() -> Iterator[Finding]:
    """Every dependency of the package: there, and not older than it asks for."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in requires("megatron-lite") or []]
    except PackageNotFoundError:
        yield Finding("wrong", "megatron-lite is not installed here", "in the checkout: pip install -e .")
        return
    good = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield Finding("wrong", f"{requirement.name} is missing", f"pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield Finding("wrong", f"{requirement.name} {found}, wanted {requirement.specifier}", f"pip install '{requirement}'")
        else:
            good.append(f"{requirement.name} {found}")
    yield Finding("ok", "packages: " + ", ".join(good))


def check_devices() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        yield Finding("wrong", f"torch can't be loaded: {error}", "install it again")
        return
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use training.precision=fp32"
            yield Finding("ok", f"GPU {number}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}")
    elif list(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding(
            "wrong", "there are GPUs, but torch can't use them", "install a torch for this machine's CUDA driver: nvidia-smi shows it"
        )
    else:
        yield Finding("note", "no GPU: training runs on the CPU", "fine for small models; mlite init sizes them for it")


def check_resources() -> Iterator[Finding]:
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    grade: Grade = "ok" if memory.available > 2 << 30 else "note"
    remedy = "" if grade == "ok" else "less than 2 GiB is free: close something first"
    yield Finding(grade, f"{cores} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory free", remedy)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        yield Finding(
            "note", f"OMP_NUM_THREADS={threads}: so many threads a process", "unset it and each process gets its share of the cores"
        )
    free = shutil.disk_usage(Path.cwd()).free
    grade = "ok" if free > 5 << 30 else "note"
    yield Finding(
        grade, f"{free / 2**30:.1f} GiB free on the disk of {Path.cwd()}", "" if grade == "ok" else "checkpoints take 12 bytes a parameter"
    )
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).total < 1 << 30:
        yield Finding("note", "/dev/shm is below 1 GiB", "in a container: --shm-size=8g; NCCL needs it between GPUs of a node")


def check_network() -> Iterator[Finding]:
    """What ranks need to find each other: a port on this machine, and a host name that leads back to it."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            with socket.create_connection(probe.getsockname(), timeout=5):
                yield Finding("ok", "processes on this machine can connect to each other")
    except OSError as error:
        yield Finding("wrong", f"processes on this machine can't connect to each other: {error}", "a firewall or sandbox forbids 127.0.0.1")
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        yield Finding(
            "note", f"the host name {socket.gethostname()} has no address", "set GLOO_SOCKET_IFNAME=lo (one machine) or its network's name"
        )


def check_folders() -> Iterator[Finding]:
    if os.access(Path.cwd(), os.W_OK):
        yield Finding("ok", f"{Path.cwd()} can be written to")
    else:
        yield Finding("wrong", f"{Path.cwd()} can't be written to", "start from a folder of your own: runs/ and data/ are made there")


def check_surroundings() -> Iterator[Finding]:
    yield Finding(
        "ok" if shutil.which("sbatch") else "note", "Slurm: " + ("sbatch is here" if shutil.which("sbatch") else "no sbatch here")
    )
    key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
    yield Finding(
        "ok" if key else "note",
        "wandb: " + ("a key may be there" if key else "no key, so runs are logged offline"),
        "" if key else "wandb login",
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_devices,
    check_resources,
    check_network,
    check_folders,
    check_surroundings,
)
