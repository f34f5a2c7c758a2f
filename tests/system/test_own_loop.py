"""Coroutines waited for by plain functions, wherever these are called from."""

import asyncio
import threading

import pytest

from hybridtei.system.own_loop import OwnLoop


async def where():
    return threading.get_ident(), asyncio.get_running_loop()


async def fail():
    raise KeyError("told")


def test_every_call_is_answered_by_one_loop_even_from_within_another():
    own = OwnLoop()

    async def within():
        assert await where() != own.run(where())

    first = own.run(where())
    asyncio.run(within())
    assert own.run(where()) == first
    assert first[0] != threading.get_ident()
    with pytest.raises(KeyError, match="told"):
        own.run(fail())
    own.close()
    assert first[1].is_closed()


def test_closing_cancels_what_runs_and_a_loop_never_begun_closes_too():
    OwnLoop().close()
    own = OwnLoop()
    ended = threading.Event()

    async def begin():
        async def last():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        task = asyncio.create_task(last())
        await asyncio.sleep(0)
        return task

    task = own.run(begin())
    own.close()
    assert ended.is_set()
    assert task.cancelled()
