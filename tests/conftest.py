from __future__ import annotations

import os

# Before anything imports the libraries that read it, and inherited by the workers: no test waits for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

from tests.harness import Pool

# The same cases in every run, and no limit on the time of one: a call that starts workers takes longer than the next.
hypothesis.settings.register_profile("meshcp", derandomize=True, deadline=None)
hypothesis.settings.load_profile("meshcp")

_POOL = pytest.StashKey[Pool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    # Begun here and not in the fixture, so that the imports in the zygote overlap with the tests that need no workers.
    wanted = any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        session.config.stash[_POOL] = Pool(session.config.getini("filterwarnings"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if pool := config.stash.get(_POOL, None):
        pool.close()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Pool:
    """Workers for any world size: `pool.run(world, fn, *args, timeout=60, **kwargs)` returns the results by rank."""
    return request.config.stash[_POOL]
