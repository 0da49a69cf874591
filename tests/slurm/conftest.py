"""A two-node Slurm for the whole session. Where this machine can't hold one, its tests are skipped, and say why; with
MLITE_REQUIRE_SLURM=1 that is a failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.integration.conftest import CONFIG
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.site import Site


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    why = why_not()
    if why and os.environ.get("MLITE_REQUIRE_SLURM"):
        pytest.fail(f"MLITE_REQUIRE_SLURM is set, but {why}")
    if why:
        pytest.skip(why)
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    found.dies_with_us = True
    found.up(nodes=2, cpus=4, gpus=2)
    yield found
    found.down()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    tiny_dataset(folder, tiny_texts(40, seed=3))
    return folder


@pytest.fixture(scope="session")
def make_site(cluster: Cluster, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Site]:
    """Working folders on the login node, one a name."""

    def make(name: str) -> Site:
        folder = tmp_path_factory.mktemp(name)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump({**CONFIG, "data": {"path": str(dataset)}}))
        return Site(folder, config, environ=cluster.environment(), cluster=cluster)

    return make
