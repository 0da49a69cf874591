"""A real multi-node Slurm on one Linux machine, as root: every node has a network, host name, process ids and /dev/shm of its own.

    python tests/slurm/cluster.py install                       the packages, by apt
    python tests/slurm/cluster.py up --state DIR [--nodes 2] [--cpus 4] [--gpus 2]
    eval "$(python tests/slurm/cluster.py env --state DIR)"     then sbatch, srun, squeue just work
    python tests/slurm/cluster.py crash|start NODE --state DIR  power loss of node1, node2, ...; back again
    python tests/slurm/cluster.py down --state DIR

A "head" namespace holds the controller, a bridge and the nodes' namespaces; when its first process is killed, the kernel kills all
the rest. Files are shared, as on a cluster. No accounting: `sacct` answers nothing. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PACKAGES = ["munge", "slurmctld", "slurmd", "slurm-client", "iproute2", "util-linux"]
TOOLS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "unshare", "nsenter"]
CLIENTS = ["sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sinfo"]
SUBNET = "10.213.0"  # inside our namespaces only
PORT = 6817
PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
NAMESPACES = {"n": "--net", "u": "--uts", "i": "--ipc", "m": "--mount", "p": "--pid"}
# The first process of a namespace: it reaps orphans, nothing else.
REAPER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while True:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
    signal.sigtimedwait([signal.SIGCHLD], 1)
"""
CONF = """\
ClusterName=ci
SlurmctldHost=head({subnet}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it starts again: 120 s where it is not set, 5 at the least
AuthInfo=socket={run}/munge.socket,cred_expire=5
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# lets a node claim more CPUs and memory than this machine has
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
# what no node can ever satisfy fails at submission instead of pending for ever
EnforcePartLimits=ALL
SlurmdTimeout=10
SlurmctldTimeout=30
KillWait=10
MinJobAge=3600
BatchStartTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,max_rpc_cnt=0
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(RuntimeError):
    """The cluster can't be what was asked for."""


class Cluster:
    """One cluster, in the folder `state`. Its processes are known by id and start time."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        self.file = self.state / "cluster.json"
        self._launchers: list[subprocess.Popen[bytes]] = []  # reaped when all is over
        self.facts: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    # ------------------------------------------------------------------------------------------------ what is asked of it

    def up(self, *, nodes: int = 2, cpus: int = 4, gpus: int = 0, memory_mb: int = 262144) -> None:
        """Start it; a second or so. Raises ClusterError, and leaves nothing behind but logs."""
        if why := why_not():
            raise ClusterError(why)
        self.down()
        for name in ("etc", "run", "log", "munge", "ctld", "spool", "dev", "bin"):
            (self.state / name).mkdir(parents=True, exist_ok=True)
        (self.state / "munge").chmod(0o700)
        self.facts = {"nodes": nodes, "processes": {}}
        try:
            self._configure(cpus=cpus, gpus=gpus, memory_mb=memory_mb)
            self._start_head()
            for name in self.names:
                self.start(name, wait=False)
            wait_for("all nodes to be idle", lambda: set(self.node_states().values()) == {"idle"} and len(self.node_states()) == nodes, 60)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all of it, at once."""
        self._kill("head")
        for key in list(self.facts.get("processes", {})):
            wait_for(f"{key} to end", lambda key=key: not self._alive(key), 20)
        while self._launchers:
            self._launchers.pop().wait(20)
        self.facts = {}
        self.file.unlink(missing_ok=True)

    def crash(self, node: str) -> None:
        """Power loss: everything on the node dies without a word."""
        self._kill(node)
        for key in (f"{node}.launcher", f"slurmd.{node}"):
            wait_for(f"{key} to end", lambda key=key: not self._alive(key), 10)
            self.facts["processes"].pop(key, None)

    def start(self, node: str, *, wait: bool = True) -> None:
        """Boot a node that is not there."""
        if not self._alive(node):
            self._boot(node)
            number = int(node[4:])
            with contextlib.suppress(ClusterError):
                self._run("ip", "link", "del", f"veth{number}")
            self._run("ip", "link", "add", f"veth{number}", "type", "veth", "peer", "name", "eth0", "netns", str(self._pid(node)))
            self._run("ip", "link", "set", f"veth{number}", "addrgenmode", "none", "master", "br0", "up")
            self._run("ip", "link", "set", "eth0", "addrgenmode", "none", "up", where=node)
            self._run("ip", "addr", "add", f"{self._address(node)}/24", "dev", "eth0", where=node)
        pid_file = self.state / "run" / f"slurmd.{node}.pid"
        self._daemon(f"slurmd.{node}", ["slurmd", "-N", node, "-f", str(self.conf)], pid_file, where=node)
        if wait:
            wait_for(f"{node} to be back", lambda: self.node_states().get(node) in ("idle", "mixed", "allocated"), 60)

    def environment(self) -> dict[str, str]:
        """What a user's shell on the login node has: the client commands first on PATH."""
        return {"SLURM_CONF": str(self.conf), "PATH": f"{self.state / 'bin'}:{os.environ['PATH']}"}

    def node_states(self) -> dict[str, str]:
        lines = self._run("sinfo", "-N", "-h", "-o", "%N %T", check=False).splitlines()
        return dict(line.split()[:2] for line in lines if len(line.split()) == 2)

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.facts["nodes"] + 1)]

    @property
    def conf(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    # -------------------------------------------------------------------------------------------------------- its parts

    def _address(self, name: str) -> str:
        return f"{SUBNET}.{1 if name == 'head' else 10 + int(name[4:])}"

    def _configure(self, *, cpus: int, gpus: int, memory_mb: int) -> None:
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={self._address(name)} Port={PORT + 1} CPUs={cpus} RealMemory={memory_mb}{gres} State=UNKNOWN"
            for name in self.names
        )
        self.conf.write_text(CONF.format(subnet=SUBNET, port=PORT, run=self.state / "run", state=self.state, nodes=nodes))
        for number in range(gpus):  # slurmd wants a device, any device: then it sets CUDA_VISIBLE_DEVICES
            with contextlib.suppress(FileExistsError):
                os.mknod(self.state / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, Path("/dev/null").stat().st_rdev)
        lines = [f"NodeName={name} Name=gpu File={self.state / 'dev' / f'gpu{number}'}\n" for name in self.names for number in range(gpus)]
        (self.state / "etc" / "gres.conf").write_text("".join(lines))
        (self.state / "etc" / "cgroup.conf").write_text("ConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n")
        # The ::ffff: lines serve reverse look-ups by dual-stack sockets.
        hosts = "".join(f"{prefix}{self._address(name)} {name}\n" for prefix in ("", "::ffff:") for name in ("head", *self.names))
        (self.state / "etc" / "hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n" + hosts)

    def _start_head(self) -> None:
        self._boot("head")
        self._run("ip", "link", "add", "br0", "type", "bridge")
        self._run("ip", "link", "set", "br0", "addrgenmode", "none", "up")
        self._run("ip", "addr", "add", f"{self._address('head')}/24", "dev", "br0")
        self._write_clients()
        key, run, log = self.state / "munge" / "key", self.state / "run", self.state / "log"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--key-file={key}", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log"]
        self._daemon("munged", ["munged", "--force", "--num-threads=4", *files, f"--seed-file={self.state}/munge/seed"], run / "munged.pid")
        self._daemon("slurmctld", ["slurmctld", "-i", "-f", str(self.conf)], run / "slurmctld.pid")
        wait_for("slurmctld to answer", lambda: "is UP" in self._run("scontrol", "ping", check=False), 40)

    def _write_clients(self) -> None:
        """bin/: client commands that step into the head's network when called from outside."""
        outside = str(Path("/proc/self/ns/net").readlink())
        for name in CLIENTS:
            real = shutil.which(name, path=PATH)
            wrapper = self.state / "bin" / name
            wrapper.write_text(
                f"#!/bin/sh\nexport SLURM_CONF={shlex.quote(str(self.conf))}\n"
                f'if [ "$(readlink /proc/self/ns/net)" = "{outside}" ]; then\n'
                f'  exec nsenter --net=/proc/{self._pid("head")}/ns/net {real} "$@"\nfi\nexec {real} "$@"\n'
            )
            wrapper.chmod(0o755)

    def _boot(self, name: str) -> None:
        """A new "machine": namespaces that live as long as their first process."""
        ready = self.state / "run" / f"{name}.ready"
        ready.unlink(missing_ok=True)
        script = "\n".join(
            [
                "set -e",
                f"hostname {name}",
                f"mount --bind {shlex.quote(str(self.state / 'etc' / 'hosts'))} /etc/hosts",
                "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
                "ip link set lo up",
                f"touch {shlex.quote(str(ready))}",
                f"exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(REAPER)}",
            ]
        )
        command = ["unshare", *NAMESPACES.values(), "--fork", "--kill-child=KILL", "--mount-proc", "sh", "-c", script]
        if name != "head":  # inside the head's, so that its death takes every node along
            command = [*self._enter("head", "mp"), *command]
        with open(self.state / "log" / f"{name}.boot", "ab") as log:
            top = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)

        def first_process() -> int | None:
            if top.poll() is not None:
                raise ClusterError(f"{name} does not start: {(self.state / 'log' / f'{name}.boot').read_text()}")
            pid: int | None = top.pid
            for _ in range(1 if name == "head" else 2):  # unshare, the first process; or nsenter, unshare, the first process
                pid = next(iter(children(pid)), None) if pid else None
            return pid if ready.exists() else None

        pid = wait_for(f"the namespace of {name}", first_process, 15)
        self._launchers.append(top)
        self._record(f"{name}.launcher", top.pid)
        self._record(name, pid)

    def _daemon(self, key: str, command: list[str], pid_file: Path, *, where: str = "head") -> None:
        """Start something that puts itself into the background."""
        pid_file.unlink(missing_ok=True)
        self._run(*command, where=where, namespaces="nuimp")

        def inner() -> int:
            try:
                return int(pid_file.read_text())
            except (OSError, ValueError):
                return 0

        self._record(key, self._outside(where, wait_for(f"{key}'s pid file", inner, 20)))

    def _outside(self, where: str, inner: int) -> int:
        """The id out here of a process that is `inner` in there."""
        namespace = Path(f"/proc/{self._pid(where)}/ns/pid").readlink()
        for pid in process_ids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/ns/pid").readlink() == namespace:
                    match = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
                    if match is not None and int(match[1].split()[-1]) == inner:
                        return pid
        raise ClusterError(f"no process {inner} on {where}; see {self.state / 'log'}")

    def _enter(self, where: str, namespaces: str) -> list[str]:
        return ["nsenter", "-t", str(self._pid(where)), *[NAMESPACES[letter] for letter in namespaces], "--"]

    def _run(self, *command: str, where: str = "head", namespaces: str = "n", check: bool = True) -> str:
        """Run to its end; a daemon must not keep our pipe open, so the output goes through a file."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        output = self.state / "log" / "commands.txt"
        with open(output, "ab+") as log:
            begin = log.seek(0, os.SEEK_END)
            result = subprocess.run(
                [*self._enter(where, namespaces), *command],
                env={**kept, "PATH": PATH, "SLURM_CONF": str(self.conf)},
                cwd="/",
                timeout=60,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            log.seek(begin)
            text = log.read().decode(errors="replace")
        if check and result.returncode:
            raise ClusterError(f"`{shlex.join(command)}` on {where} ended with {result.returncode}: {text.strip()}")
        return text

    # ---------------------------------------------------------------------------------------------------- its processes

    def _record(self, key: str, pid: int) -> None:
        began = began_at(pid)
        if began is None:
            raise ClusterError(f"{key} died at once; see {self.state / 'log'}")
        self.facts["processes"][key] = [pid, began]
        self.file.write_text(json.dumps(self.facts))

    def _alive(self, key: str) -> bool:
        record = self.facts.get("processes", {}).get(key)
        return record is not None and began_at(record[0]) == record[1]

    def _pid(self, key: str) -> int:
        if not self._alive(key):
            raise ClusterError(f"{key} is not running")
        return int(self.facts["processes"][key][0])

    def _kill(self, key: str) -> None:
        if self._alive(key):
            os.kill(self._pid(key), signal.SIGKILL)
            wait_for(f"{key} to end", lambda: not self._alive(key), 20)
        self.facts.get("processes", {}).pop(key, None)


def why_not() -> str:
    """Why this machine can't hold a cluster; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "the test cluster needs Linux"
    if os.geteuid() != 0:
        return "the test cluster needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found: `python tests/slurm/cluster.py install` installs Slurm (apt, as root)"
    probe = ["unshare", *NAMESPACES.values(), "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        return "this machine does not let root make namespaces (a container without the rights?)"
    return ""


def install() -> None:
    """Slurm and munge by apt, without starting their services."""
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=environ, check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], env=environ, check=True)
    finally:
        if ours:
            policy.unlink()


def began_at(pid: int) -> int | None:
    """The kernel's start time of a process that is alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def children(pid: int) -> list[int]:
    found = []
    for each in process_ids():
        with contextlib.suppress(OSError, IndexError):
            if int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(each)
    return found


def wait_for(what: str, test: Callable[[], T | None], timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := test()):
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.05)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["install", "why-not", "up", "down", "env", "crash", "start"])
    parser.add_argument("node", nargs="?")
    parser.add_argument("--state", type=Path, default=Path("slurm-state"))
    for name, default in (("nodes", 2), ("cpus", 4), ("gpus", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    words = parser.parse_args()
    cluster = Cluster(words.state)
    if words.verb == "install":
        install()
    elif words.verb == "why-not":
        print(why_not())
        return 1 if why_not() else 0
    elif words.verb == "up":
        cluster.up(nodes=words.nodes, cpus=words.cpus, gpus=words.gpus)
    elif words.verb == "down":
        cluster.down()
    elif words.verb == "env":
        for name, value in cluster.environment().items():
            print(f"export {name}={shlex.quote(value)}")
    elif words.node in cluster.names:
        (cluster.crash if words.verb == "crash" else cluster.start)(words.node)
    else:
        parser.error(f"a node is wanted: {', '.join(cluster.names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
