"""The main job: config, check, build, fit. Started by deepspeed, torchrun, srun or plain python:

deepspeed launcher/train.py --config configs/run/tiny.yaml [section.key=value ...]
"""

import sys
from pathlib import Path

# The folder of a script comes first on sys.path, where our modules would hide libraries of the same name.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
if str(_HERE.parent) not in sys.path:
    sys.path.insert(0, str(_HERE.parent))

import contextlib  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402

from data_pipeline.errors import MegatronLiteError, RunInUseError  # noqa: E402
from launcher.config import load_config, parse_arguments, with_vocabulary  # noqa: E402
from launcher.console import show  # noqa: E402
from launcher.datasets import open_datasets  # noqa: E402
from launcher.environment import Environment, read_environment  # noqa: E402
from launcher.faults import Faults  # noqa: E402
from launcher.huggingface import require_fitting_weights  # noqa: E402
from launcher.process_tree import launcher_chain  # noqa: E402
from launcher.run_folder import RunFolder  # noqa: E402

USAGE = "Usage: deepspeed launcher/train.py --config CONFIG [section.key=value ...]"


def main(argv: list[str]) -> int:
    """The exit code. Everything that can be refused without torch is refused before it is loaded."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    environment, chain = Environment(), launcher_chain()  # before anything slow: a launcher may die while we load
    folder: RunFolder | None = None
    try:
        environment = read_environment(os.environ)
        arguments = parse_arguments(argv, usage=USAGE)
        config = load_config(arguments.config, arguments.overrides, world_size=environment.world_size)
        folder = RunFolder(config.run.folder)
        datasets = open_datasets(config.data)
        config = with_vocabulary(config, tokenizer_size=datasets[0].vocab_size)
        require_fitting_weights(config, datasets)
        faults = Faults(os.environ.get("MLITE_FAULT", ""), rank=environment.rank)
        if environment.rank == 0:
            folder.begin(environment)
    except MegatronLiteError as error:
        return refuse(error, environment, folder)
    from launcher.job import run_job  # loads torch

    return run_job(config, environment, folder, datasets, faults, chain)


def refuse(error: MegatronLiteError, environment: Environment, folder: RunFolder | None) -> int:
    """Say why nothing starts, and put it in the run's status.json unless another job is writing there.

    Every rank meets the same fault. The first says it; the others give it time to, since a launcher ends all ranks with
    the first that exits.
    """
    if environment.rank != 0:
        time.sleep(3)
    show(f"{'' if environment.rank == 0 else f'rank {environment.rank}: '}{error}", error=True)
    ours = environment.rank == 0 and folder is not None and not isinstance(error, RunInUseError)
    if ours and folder is not None and folder.status_file.exists() and not folder.lock.held_by_somebody():
        try:
            folder.refuse(environment, code=error.exit_code, message=str(error))
        except (MegatronLiteError, OSError) as second:
            show(f"{folder.status_file} was not updated: {second}", error=True)
    return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # threads that libraries left behind (a tracker's, a backend's) don't hold the job up
