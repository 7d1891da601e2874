"""Fixtures of the tests over HTTP."""

import pytest_asyncio

from support.e2e_harness import serving


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny():
    """One server for all tests that leave it as it was."""
    async with serving() as running:
        yield running
