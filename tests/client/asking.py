"""Both clients, called alike: `ask(url, verb, …)`, with settings of the client among the
options."""

import asyncio
from collections.abc import Callable
from typing import Any

from hybridtei.client import AsyncClient, Client

Ask = Callable[..., Any]


def blocking(url, verb, *arguments, **options):
    settings = {
        name: options.pop(name)
        for name in ("timeout_s", "patience_s", "api_key")
        if name in options
    }
    with Client(url, **settings) as client:
        return getattr(client, verb)(*arguments, **options)


def awaited(url, verb, *arguments, **options):
    settings = {
        name: options.pop(name)
        for name in ("timeout_s", "patience_s", "api_key")
        if name in options
    }

    async def call():
        async with AsyncClient(url, **settings) as client:
            return await getattr(client, verb)(*arguments, **options)

    return asyncio.run(call())
