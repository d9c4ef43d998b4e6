"""Eight virtual CPU devices, and empty caches for each test."""

import os

# Before anything imports jax: both are read once. A platform that was asked for is kept.
_DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _empty_caches():
    import loopjit

    loopjit.cache_clear()
    yield
    loopjit.cache_clear()
