"""Several models in one process: each with a queue of its own, all that run on one device sharing its lanes fairly."""

from __future__ import annotations

import asyncio

from hybridtei.config import EngineConfig
from hybridtei.engine.device import STOP_SECONDS, Device
from hybridtei.engine.service import EngineService
from hybridtei.load import LoadedModel
from hybridtei.observability.metrics import Registry
from hybridtei.system.cpu import LaneKind


class Fleet:
    """What the models of a process have in common: settings and devices."""

    def __init__(self, engine: EngineConfig) -> None:
        self.engine = engine
        self._devices: dict[tuple[LaneKind, ...], Device] = {}

    def service(self, loaded: LoadedModel, registry: Registry) -> EngineService:
        """An engine for a loaded model, on the device of those with the same lanes; it counts in `registry`."""
        return EngineService(
            loaded.model,
            loaded.backend,
            self.engine,
            budget_tokens=loaded.budget_tokens,
            registry=registry,
            device=self._device(loaded.backend.lanes),
        )

    async def stop(self) -> None:
        """End the lanes, once the services have stopped."""
        for device in self._devices.values():
            await asyncio.to_thread(device.stop, STOP_SECONDS)

    def _device(self, lanes: tuple[LaneKind, ...]) -> Device:
        if lanes not in self._devices:
            self._devices[lanes] = Device(lanes, bulk_niceness=self.engine.bulk_niceness, pass_timeout=self.engine.pass_timeout)
            self._devices[lanes].start()
        return self._devices[lanes]
