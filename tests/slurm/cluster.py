"""A real multi-node Slurm on one Linux machine, as root: every node has a network, host name, process ids and /dev/shm of its own.

    python -m tests.slurm.cluster install                       the packages, by apt
    python -m tests.slurm.cluster up --state DIR [--nodes 2] [--cpus 4] [--gpus 2]
    eval "$(python -m tests.slurm.cluster env --state DIR)"     then sbatch, srun, squeue just work
    python -m tests.slurm.cluster crash|start NODE --state DIR  power loss of node1, node2, ...; back again
    python -m tests.slurm.cluster down --state DIR

A "head" namespace holds the controller, a bridge and the nodes' namespaces; when its first process is killed, the kernel kills all
the rest. Files are shared, as on a cluster. No accounting: `sacct` answers nothing. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from tests.slurm.namespaces import NAMESPACES, PATH, ClusterError, Machines, wait_for

PACKAGES = ["munge", "slurmctld", "slurmd", "slurm-client", "iproute2", "util-linux"]
TOOLS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "unshare", "nsenter"]
CLIENTS = ["sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sinfo"]
SUBNET = "10.213.0"  # inside our namespaces only
PORT = 6817
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
# A busy machine may be silent for long and is not dead: of a crash the controller is told
SlurmdTimeout=60
SlurmctldTimeout=30
KillWait=10
MinJobAge=3600
BatchStartTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,max_rpc_cnt=0
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster(Machines):
    """One cluster, in the folder `state`."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.environ = {"SLURM_CONF": str(self.conf)}

    # ------------------------------------------------------------------------------------------------ what is asked of it

    def up(self, *, nodes: int = 2, cpus: int = 4, gpus: int = 0, memory_mb: int = 262144) -> None:
        """Start it; a second or so. Raises ClusterError, and leaves nothing behind but logs."""
        if why := why_not():
            raise ClusterError(why)
        self.down()
        for name in ("etc", "run", "log", "munge", "ctld", "spool", "dev", "bin"):
            shutil.rmtree(self.state / name, ignore_errors=True)  # of an earlier cluster here
            (self.state / name).mkdir(parents=True)
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
        self.end_all()

    def crash(self, node: str) -> None:
        """Power loss: everything on the node dies without a word; the controller's look at it comes at once."""
        self.kill(node)
        for key in (f"{node}.launcher", f"slurmd.{node}"):
            wait_for(f"{key} to end", lambda key=key: not self.alive(key), 10)
            self.facts["processes"].pop(key, None)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def start(self, node: str, *, wait: bool = True) -> None:
        """Boot a node that is not there."""
        if not self.alive(node):
            self.boot(node)
            number = int(node[4:])
            with contextlib.suppress(ClusterError):
                self.run("ip", "link", "del", f"veth{number}")
            self.run("ip", "link", "add", f"veth{number}", "type", "veth", "peer", "name", "eth0", "netns", str(self.pid(node)))
            self.run("ip", "link", "set", f"veth{number}", "addrgenmode", "none", "master", "br0", "up")
            self.run("ip", "link", "set", "eth0", "addrgenmode", "none", "up", where=node)
            self.run("ip", "addr", "add", f"{self._address(node)}/24", "dev", "eth0", where=node)
        pid_file = self.state / "run" / f"slurmd.{node}.pid"
        self.daemon(f"slurmd.{node}", ["slurmd", "-N", node, "-f", str(self.conf)], pid_file, where=node)
        if wait:
            wait_for(f"{node} to be back", lambda: self.node_states().get(node) in ("idle", "mixed", "allocated"), 60)

    def environment(self) -> dict[str, str]:
        """What a user's shell on the login node has: the client commands first on PATH."""
        return {"SLURM_CONF": str(self.conf), "PATH": f"{self.state / 'bin'}:{os.environ['PATH']}"}

    def node_states(self) -> dict[str, str]:
        lines = self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).splitlines()
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
        self.boot("head")
        self.run("ip", "link", "add", "br0", "type", "bridge")
        self.run("ip", "link", "set", "br0", "addrgenmode", "none", "up")
        self.run("ip", "addr", "add", f"{self._address('head')}/24", "dev", "br0")
        self._write_clients()
        key, run, log = self.state / "munge" / "key", self.state / "run", self.state / "log"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--key-file={key}", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log"]
        self.daemon("munged", ["munged", "--force", "--num-threads=4", *files, f"--seed-file={self.state}/munge/seed"], run / "munged.pid")
        self.daemon("slurmctld", ["slurmctld", "-i", "-f", str(self.conf)], run / "slurmctld.pid")
        wait_for("slurmctld to answer", lambda: "is UP" in self.run("scontrol", "ping", check=False), 40)

    def _write_clients(self) -> None:
        """bin/: client commands that step into the head's network when called from outside."""
        outside = str(Path("/proc/self/ns/net").readlink())
        for name in CLIENTS:
            real = shutil.which(name, path=PATH)
            wrapper = self.state / "bin" / name
            wrapper.write_text(
                f"#!/bin/sh\nexport SLURM_CONF={shlex.quote(str(self.conf))}\n"
                f'if [ "$(readlink /proc/self/ns/net)" = "{outside}" ]; then\n'
                f'  exec nsenter --net=/proc/{self.pid("head")}/ns/net {real} "$@"\nfi\nexec {real} "$@"\n'
            )
            wrapper.chmod(0o755)


def why_not() -> str:
    """Why this machine can't hold a cluster; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "the test cluster needs Linux"
    if os.geteuid() != 0:
        return "the test cluster needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found: `python -m tests.slurm.cluster install` installs Slurm (apt, as root)"
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
