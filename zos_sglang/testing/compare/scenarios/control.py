"""Control calls while requests run: pause, reload, mode switch, health and load readings."""

from __future__ import annotations

import asyncio

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.records import Record, Records
from zos_sglang.testing.compare.scenario import Scenario, Stage, count, greedy
from zos_sglang.testing.compare.scenarios.configs import PLAIN

# After a pause was confirmed, what is on its way still arrives: until nothing has for QUIET_S
# (a busy machine may take its time). Then nothing may come for PAUSE_S.
QUIET_S = 0.8
PAUSE_S = 1.2


class Load:
    """12 requests, 3 streaming, in the background of a control call; counts their events.

    Few stream, or the client could not keep up with a tiny model and would act late.

    `tokens` is the length of the longest answer, before ModelInfo.lasting stretches it.
    """

    def __init__(self, stage: Stage, name: str, seed: int, tokens: int = 120, count: int = 12) -> None:
        self.stage, self.name = stage, name
        self.events = 0
        self.records: list[Record] = []
        self.task = asyncio.create_task(self._play(seed, stage.model.lasting(tokens), count))

    async def _play(self, seed: int, tokens: int, count: int) -> None:
        model, generate = self.stage.model, self.stage.client.generate
        self.records = await self.stage.gather(
            *(
                generate(
                    f"{self.name}-{i:02}",
                    model.ids(10 + 4 * i, seed + i),
                    greedy(tokens - i),
                    stream=i % 4 == 0,
                    on_event=self._count,
                )
                for i in range(count)
            )
        )

    def _count(self, record: Record) -> None:
        self.events += 1

    async def events_after(self, number: int) -> None:
        """Wait until `number` further events have arrived, or the load has ended."""
        goal = self.events + number
        while self.events < goal and not self.task.done():
            await asyncio.sleep(0.005)

    async def is_quiet(self, limit_s: float = 30.0) -> bool:
        """Wait until no event has come for QUIET_S; False if that takes longer than `limit_s`."""
        for _ in range(int(limit_s / QUIET_S)):
            before = self.events
            await asyncio.sleep(QUIET_S)
            if self.events == before:
                return True
        return False


async def pause_and_continue(stage: Stage) -> None:
    """A pause in place, one that retracts, and a request that arrives while paused."""
    client, model = stage.client, stage.model
    for mode in ("in_place", "retract"):
        load = Load(stage, mode, seed=4000)
        await load.events_after(12)
        await client.must("/pause_generation", {"mode": mode})
        late = asyncio.create_task(client.generate(f"{mode}-late", model.ids(9, 4090), greedy(12)))
        paused = client.records[f"/pause_generation#{1 + (mode != 'in_place')}"]
        if not await load.is_quiet():
            paused.faults.append(f"events kept coming in the pause ({mode})")
        before = load.events
        await asyncio.sleep(PAUSE_S)
        if load.events != before:
            paused.faults.append(f"{load.events - before} events during the pause ({mode})")
        if load.task.done():
            paused.faults.append(f"the load had ended before the pause ({mode}): nothing was paused")
        await client.must("/continue_generation", {})
        await load.task
        await late


async def reload_weights(stage: Stage) -> None:
    """The same weights from disk: paused in place, paused with retraction, and without a pause."""
    client = stage.client
    disk = {"model_path": str(stage.model.path)}
    load = Load(stage, "in_place", seed=4200)
    await load.events_after(12)
    await client.must("/pause_generation", {"mode": "in_place"})
    # Running requests keep their pages, so the cache cannot be flushed here.
    await client.must("/update_weights_from_disk", {**disk, "flush_cache": False})
    await client.must("/continue_generation", {})
    await load.events_after(12)
    await client.must("/pause_generation", {"mode": "retract"})
    await client.must("/update_weights_from_disk", {**disk, "flush_cache": True})
    await client.must("/continue_generation", {})
    await load.task
    load = Load(stage, "unpaused", seed=4230, tokens=60)
    await load.events_after(6)
    # Waits for the running requests, and new ones wait for it.
    await stage.gather(
        client.must("/update_weights_from_disk", disk),
        stage.later(0.05, client.generate("behind", stage.model.ids(30, 4299), greedy(16))),
        load.task,
    )


async def live_switch(stage: Stage) -> None:
    """Our server goes through every way of running while 3 waves of requests are under way."""
    client = stage.client
    own = stage.our_mode or "overlap"
    for wave, modes in enumerate((("stock", "sync"), (own, "sync", "stock"), ("overlap", own))):
        load = Load(stage, f"wave{wave}", seed=4400 + 50 * wave, tokens=60)
        for mode in modes:
            await load.events_after(10)
            await _switch(stage, mode)
        await load.task
    await _switch(stage, own)
    # Each answer's own events prove little if the switches all fell behind it.
    await client.generate("after", stage.model.ids(20, 4590), greedy(16))


async def _switch(stage: Stage, mode: str) -> None:
    if not stage.ours or stage.our_mode is None:
        return
    client = stage.client
    response = await client.control("/set_internal_state", {"server_args": {"zos_mode": mode}})
    if response.status_code != 200:
        raise RuntimeError(f"switch to {mode}: {response.status_code} {response.text[:300]}")
    # A switch waits until nothing is in flight; the next one would replace it.
    for _ in range(200):
        state = await client.zos() or {}
        if state.get("mode") == mode and not state.get("pending_mode"):
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"still not in mode {mode} after 10 s: {state}")


async def busy_readings(stage: Stage) -> None:
    """Health, load, model and server readings while 12 requests run."""
    client = stage.client
    load = Load(stage, "load", seed=4700, tokens=120)
    await load.events_after(8)
    paths = ["/health", "/v1/loads", "/server_info", "/model_info", "/v1/models", "/health_generate"]
    paths += ["/v1/loads?include=core", "/get_server_info", "/v1/loads", "/server_info"]
    for i, path in enumerate(paths):
        await client.read(f"read-{i}{path}", path)
    await load.task
    for i, path in enumerate(("/health_generate", "/v1/loads", "/server_info")):
        await client.read(f"idle-{i}{path}", path)
    for record in client.records.values():
        # What only ours reports, and where a reading may catch the server with empty lists.
        record.fields = [
            name
            for name in record.fields
            if ".zos" not in name and "zos_" not in name and not name.startswith(".launch_command")
        ]


def pauses_seen(records: Records) -> int:
    """Evidence: pauses that fell into a running load."""
    return sum(1 for r in records.values() if r.name.startswith("/pause") and not r.faults)


SCENARIOS = (
    Scenario(
        "pause",
        "pause in place and with retraction, then continue",
        pause_and_continue,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"pauses": pauses_seen, "retracted": lambda rs: sum(r.retractions for r in rs.values())},
            batch=8,
        ),
    ),
    Scenario(
        "reload",
        "the same weights reloaded from disk while requests run",
        reload_weights,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            log=("Update weights end.",),
            seen={"reloads": count(lambda r: r.name.startswith("/update_weights") and r.status == 200)},
            batch=8,
        ),
    ),
    Scenario(
        "live-switch",
        "ours goes through stock, sync, overlap and its own mode while requests run",
        live_switch,
        PLAIN,
        Evidence(reasons=("overlapped", "mode-sync"), paths=("mode-switches",), batch=8),
        smoke=True,
    ),
    Scenario(
        "busy-readings",
        "health, load and server readings while requests run",
        busy_readings,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"readings": count(lambda r: r.name.startswith("read") and r.status == 200)},
            batch=8,
        ),
    ),
)
