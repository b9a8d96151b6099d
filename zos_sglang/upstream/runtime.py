"""One scheduler process: its settings, its mode, and the change from one mode to another.

A switch happens at a step boundary with nothing in flight: after intake, every pending result is
processed, and the next batch is selected by the new mode. Modes `stock` and `off` run upstream's own
`event_loop_overlap`; `off` puts every original callable back first and is final.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from zos_sglang.modes import Mode
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.event_loop import Ended, EventLoop
from zos_sglang.overlap.guards import PrefillRule, first_token_is_there, make_guard
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.result_queue import ResultQueue
from zos_sglang.overlap.stall import StallDetector, describe_batch, describe_event
from zos_sglang.overlap.streams import Streams
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.settings import Settings
from zos_sglang.upstream.drain import drain
from zos_sglang.upstream.first_token import FirstTokenExchange
from zos_sglang.upstream.host_cache import may_copy_behind
from zos_sglang.upstream.prefill_graph import launched_as_graph
from zos_sglang.upstream.releases import defers_coarse_barrier
from zos_sglang.upstream.roles import COLOCATED, PREFILL, Role, role_of
from zos_sglang.upstream.stock_bridge import SwitchMode, bridge_into_stock, leave_stock
from zos_sglang.upstream.unobserved import Unobserved, observe

logger = logging.getLogger(__name__)

#: How long a rank waits for the others' answer. At the start each captures by itself; to a switch they come
#: within one iteration, and SGLang's watchdog looks on.
START_S, LOOP_S = 300.0, 60.0


class Runtime:
    """The plugin's state in one process. Inert until `attach`."""

    def __init__(self) -> None:
        self.settings = Settings.load({})
        self.account = Account()
        self.lane_account = LaneAccount()
        #: "normal": SGLang's loop without overlap, which is only watched.
        self.mode: Mode | Literal["normal"] = "off"
        self.pending: Mode | None = None
        self.scheduler: Any = None
        self.role: Role = COLOCATED
        self.loop: EventLoop | None = None
        self.first_token = FirstTokenExchange()
        self.observation: Any = Unobserved()
        #: The rank-consensus check (`RankCheck`); None where it is off.
        self.ranks: Any = None
        #: Makes steps fail on demand (`FaultPoints`); None unless ZOS_FAULT is set.
        self.fault_points: Any = None
        #: How often this process has attached; equal on all ranks, each of which counts its failures too.
        self._attachments = 0
        #: How often the ranks were asked since then; equal on all of them too.
        self._asked = 0
        #: Whether all ranks take the same control calls in the same iteration.
        self._in_step = True
        self._stall: StallDetector | None = None
        self._launcher: Launcher | None = None
        self._lane: Any = None
        self._make_lane: Callable[[], Any] = lambda: None

    # ------------------------------------------------------------ life of a scheduler

    def run(self, stock_loop: Callable[[Any], None], scheduler: Any) -> None:
        """Run the event loop in whatever mode is in effect, until the server exits."""
        from zos_sglang.upstream.role_parts import grad_mode

        self.scheduler, attached = scheduler, True
        # Before anything can fail: by these the ranks find each other's answers.
        self._attachments += 1
        self._asked, self._in_step = 0, True
        try:
            self.attach(scheduler)
        except Exception:
            logger.exception("zos-sglang: could not attach to the scheduler; stock SGLang runs")
            attached = False
        if not self._all_ranks_have("runtime", attached):
            if attached:
                logger.warning("zos-sglang: another rank could not attach; stock SGLang runs")
            self._stop_stall_detector()
            self.scheduler = self.fault_points = None
            self._close_ranks()
            self.observation.close()
            stock_loop(scheduler)
            return
        try:
            with grad_mode(self.role):
                self._run_modes(stock_loop, scheduler)
        finally:
            self._close_ranks()
            self.observation.close()

    @property
    def alone(self) -> bool:
        """Whether this scheduler is the only rank: what is so here is so everywhere."""
        return self.scheduler is None or self.scheduler.tp_group.world_size < 2

    def watch_only(self, loop: Callable[[Any], None], scheduler: Any) -> None:
        """Run SGLang's loop without overlap, watched: nothing of it is changed, and it cannot be switched."""
        self.scheduler, self.mode = scheduler, "normal"
        self.observation = observe(scheduler, self.settings, self.lane_account)
        self.observation.enter(self.mode, "normal")
        try:
            loop(scheduler)
        finally:
            self.observation.close()

    def attach(self, scheduler: Any) -> None:
        """Build the core over a scheduler and start watching it."""
        from zos_sglang.upstream.lane_build import Parts
        from zos_sglang.upstream.port import needs_upstream_launch
        from zos_sglang.upstream.rank_check import build_rank_check, in_step
        from zos_sglang.upstream.role_parts import make_parts
        from zos_sglang.upstream.snapshot import make_snapshot

        self._in_step = in_step(scheduler.tp_group)
        self._stop_stall_detector()  # of the loop before, if the server has changed its role
        self.scheduler, self.role = scheduler, role_of(scheduler)
        self._lane = None
        self.mode = self.settings.mode or "off"
        self._snapshot = make_snapshot()
        pins = PinRing(scheduler.batch_record_buf)
        port, device, launcher = make_parts(self.role, scheduler, pins, self.account, self.settings.wait)
        streams = Streams(
            scheduler.schedule_stream,
            scheduler.forward_stream,
            scheduler.copy_stream,
            barrier_enabled=scheduler._war_barrier_enabled,
            force_coarse=_flag("SGLANG_FORCE_COARSE_WAR_BARRIER"),
        )
        if shared := streams.aliases():
            logger.warning("zos-sglang: streams share a handle: %s", "; ".join(shared))
        why_not = needs_upstream_launch(scheduler)
        if why_not:
            logger.warning("zos-sglang: launches go through upstream's run_batch: %s", why_not)
        self._launcher = launcher(device, port, streams, pins, self.account, own=why_not is None)
        parts = Parts(scheduler, device, streams, pins, port)
        self._make_lane = partial(self._lane_of_all_ranks, parts)
        self.observation = observe(scheduler, self.settings, self.lane_account)
        self.observation.place("launcher", self._launcher)
        if device.own_map:
            self.observation.place("future map", scheduler.future_map)
        self.ranks = build_rank_check(scheduler, self.settings, self.lane_account, self._attachments)
        if self.settings.fault is not None:
            from zos_sglang.upstream.fault_points import FaultPoints

            self.fault_points = FaultPoints(self, parts)
        self._start_stall_detector()

    def restart_loop(self) -> bool:
        """Begin our loop anew at the next step boundary. False: none of ours runs. Scheduler thread only."""
        if self.loop is None:
            return False
        self.loop.switch_requested = True
        return True

    def request(self, mode: Mode) -> None:
        """Ask for another mode; it takes effect at the next step boundary. Scheduler thread only."""
        if mode == (self.pending or self.mode):
            return
        self.pending = mode
        if not self.restart_loop():
            setattr(self.scheduler, self.role.select, leave_stock)

    def request_rule(self, rule: PrefillRule) -> None:
        """Ask for another consecutive-prefill rule. Scheduler thread only.

        A loop of ours starts anew with it at the next step boundary, as for a switch of the mode, so that no
        pending result was launched by another rule; other loops have no rule of ours to change.
        """
        self.settings = self.settings.model_copy(update={"consecutive_prefill": rule.value})
        self.restart_loop()

    # ------------------------------------------------------------ modes

    def _run_modes(self, stock_loop: Callable[[Any], None], scheduler: Any) -> None:
        fresh = True
        while self._run_mode(stock_loop, scheduler, fresh) is not Ended.EXIT:
            fresh = False
            if self.pending is None:
                logger.info("zos-sglang: prefill rule %s", self.prefill_rule().value)
                continue
            logger.info("zos-sglang: mode %s -> %s", self.mode, self.pending)
            self.mode, self.pending = self.pending, None
            self.account.passed("mode-switches")
        if self.mode != "off":
            self.drain_for_exit()
            self._stop_stall_detector()

    def _run_mode(self, stock_loop: Callable[[Any], None], scheduler: Any, fresh: bool) -> Ended:
        if self.mode in ("off", "stock"):
            return self._run_stock(stock_loop, scheduler)
        loop = self._loop_of_all_ranks(scheduler)
        if loop is None:
            self.mode, self.loop, self.first_token.active = "stock", None, False
            return self._run_stock(stock_loop, scheduler)
        if self.mode == "resident":
            loop.lane = self._lane_once()
        self._compare_ranks(loop)
        return self._run_ours(loop, skip_intake=not fresh)

    def _loop_of_all_ranks(self, scheduler: Any) -> EventLoop | None:
        """The loop of the mode in effect, on all ranks or on none.

        A mode is a matter of all ranks: `sync` has seen a result when it selects, and other loops have not.
        """
        loop = None
        try:
            loop = self._make_loop(scheduler)
        except Exception:
            self.account.fell_back("mode-switch", f"mode {self.mode} cannot be had, mode stock runs")
        if self._all_ranks_have("loop", loop is not None, LOOP_S):
            return loop
        if loop is not None:
            logger.warning("zos-sglang: another rank cannot have mode %s; mode stock runs", self.mode)
        return None

    def _all_ranks_have(self, what: str, here: bool, within_s: float = START_S) -> bool:
        """Whether every rank has `what`, each time asked anew. All ranks ask the same in the same order.

        Where they are not in step, each is asked for itself.
        """
        from zos_sglang.upstream.rank_board import StoreBoard, all_ranks_have

        if not self._in_step:
            return here
        self._asked += 1
        board = partial(StoreBoard.of_this_group, self._attachments)
        return all_ranks_have(f"{what} {self._asked}", here, self.scheduler.tp_group, board, within_s)

    def _lane_once(self) -> Any:
        """The lane, built at the first call: what keeps it closed does not change while a server runs."""
        if self._lane is None:
            self._lane, self._make_lane = self._make_lane(), lambda: None
        return self._lane

    def _make_loop(self, scheduler: Any) -> EventLoop:
        """The loop of the mode in effect, without its lane. SGLang's own loop replaces all that it leaves."""
        assert self._launcher is not None
        scheduler.enable_skip_finishing_decode = self.role.skips_finishing
        queue = ResultQueue()
        scheduler.result_queue = queue
        sync = self.mode == "sync"
        rule, dp_attention = self.prefill_rule(), bool(scheduler.require_mlp_sync)
        guard = make_guard(
            rule,
            dp_attention=dp_attention,
            sync=sync,
            quick=launched_as_graph(scheduler),
            mixed_waits=not may_copy_behind(scheduler),
        )
        self.first_token.active = dp_attention and rule is PrefillRule.FIRST_TOKEN and not sync
        return EventLoop(
            self._port,
            self._launcher,
            queue,
            guard,
            self.account,
            snapshot=self._snapshot,
            sync=sync,
            late_barrier=self.role is PREFILL and defers_coarse_barrier(scheduler),
            early=first_token_is_there if self._sends_early(scheduler, sync) else None,
        )

    def _sends_early(self, scheduler: Any, sync: bool) -> bool:
        """Whether a first token that is there goes out before the next launch. Ranks may not see alike."""
        wanted = self.settings.first_token == "early" and not sync and self.role is COLOCATED
        return wanted and self.alone and scheduler.spec_algorithm.is_none() and not may_copy_behind(scheduler)

    def _run_ours(self, loop: EventLoop, skip_intake: bool) -> Ended:
        self.loop = loop
        self.observation.enter(self.mode, "ours")
        self.observation.place("loop", loop)
        try:
            return loop.run(skip_intake)
        finally:
            self.loop = None
            self.first_token.active = False
            self.observation.place("loop", None)
            self.observation.leave()

    def _compare_ranks(self, loop: EventLoop) -> None:
        """Log the decisions of `loop`, the first of which is how it is set up."""
        if self.ranks is None:
            return
        log, lane, kind = self.ranks.log, self._lane, "no lane"
        log.loop, loop.ranks = loop, log
        if loop.lane is not None:
            lane.ranks = log
            kind = f"{'CUDA-graph' if lane.executor.graphs else 'eager'} lane"
        rule, window = self.prefill_rule().value, self.settings.lane_window
        log.resting(f"start of mode {self.mode}, prefill rule {rule}, {kind}, window {window}")

    def _close_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def _lane_of_all_ranks(self, parts: Any) -> Any:
        """The lane, on all ranks or on none: memory may run out on one of them alone."""
        lane = self._build_lane(parts)
        if self._all_ranks_have("lane", lane is not None):
            return lane
        if lane is not None:
            logger.warning("zos-sglang: another rank has no resident lane; mode overlap runs")
            self.lane_account.refused[Refusal.CLOSED_FOR_GOOD] += 1
            self.watch_lane(None)
            self._port.lane_results = None
        return None

    def _build_lane(self, parts: Any) -> Any:
        """The lane, or None where it cannot be had: mode `resident` is then mode `overlap`."""
        assert self._launcher is not None
        if not self._launcher.own:
            self.lane_account.refused[Refusal.UPSTREAM_LAUNCH] += 1
            return None
        try:
            built = self._assemble_lane(parts)
        except Exception:
            logger.exception("zos-sglang: the resident lane could not be built; mode overlap runs")
            self.lane_account.fault("build")
            return None
        if built is None:
            return None
        lane, results = built
        self._port.lane_results = results
        self.watch_lane(lane)
        return lane

    def watch_lane(self, lane: Any) -> None:
        """Let what watches see the steps of this lane; None: there is none any more."""
        self.observation.place("lane", lane)
        self.observation.place("lane results", self._port.lane_results if lane is not None else None)
        executor = lane.executor if lane is not None else None
        if executor is None or executor.graphs:
            # Steps of graphs do not go through the runner's forward.
            self.observation.place_forward("lane step", executor, "step", stamped=True)
            self.observation.place_forward("lane step, masked", executor, "begin", stamped=True)

    def _assemble_lane(self, parts: Any) -> Any:
        from zos_sglang.upstream.lane_build import build_lane

        return build_lane(parts, self.settings, self.lane_account)

    @property
    def _port(self) -> Any:
        """The host's side of an iteration. It holds the lane's results, so mode off must not keep it."""
        assert self._launcher is not None
        return self._launcher.port

    def time_floor(self, replays: int) -> None:
        """Time the bare model step at the lane's next opening. Scheduler thread only."""
        self._lane.floor_replays = replays

    @property
    def can_ride(self) -> bool:
        """Whether decode batches may ride the lane now."""
        return self.mode == "resident" and self._lane is not None and self._lane.is_sound

    def _run_stock(self, stock_loop: Callable[[Any], None], scheduler: Any) -> Ended:
        if scheduler.last_batch is not None:
            bridge_into_stock(scheduler, self._port)
        if self.mode == "off":
            try:
                self._let_go(scheduler)
            except Exception:
                self.account.fell_back("mode-off", "SGLang's loop runs, with hooks of ours that do nothing")
            self.scheduler = None  # hooks that could not be put back pass every call on from here
        else:
            self.observation.enter(self.mode, "stock")
        try:
            stock_loop(scheduler)
        except SwitchMode:
            scheduler.__dict__.pop(self.role.select, None)
            while scheduler.result_queue:
                self._port.process(*scheduler.result_queue.popleft())
            return Ended.SWITCH
        finally:
            self.observation.leave()
        return Ended.EXIT

    def _let_go(self, scheduler: Any) -> None:
        """Give every callable back to upstream; from here on this object is not called again."""
        from sglang.srt.managers.overlap_utils import FutureMap as UpstreamFutureMap

        from zos_sglang.upstream import hooks
        from zos_sglang.upstream.future_map import FutureMap

        self.observation.close()
        self.observation = Unobserved()
        failed = hooks.restore()
        if type(scheduler.future_map) is FutureMap:
            for ours in ("ledger", "watch"):
                scheduler.future_map.__dict__.pop(ours, None)
            scheduler.future_map.__class__ = UpstreamFutureMap
        self._stop_stall_detector()
        self._close_ranks()
        self.ranks = None
        self._launcher = self._lane = self.fault_points = None
        self._make_lane = lambda: None
        if failed:
            logger.error("zos-sglang: could not put back %s", ", ".join(failed))
        else:
            logger.info("zos-sglang: off; every callable is SGLang's own again")

    def prefill_rule(self) -> PrefillRule:
        """Our setting, else upstream's variable, else `first-token` where tokens are generated.

        The prefill role streams no token to a client; upstream knows no rule there.
        """
        if self.settings.consecutive_prefill is not None:
            return PrefillRule(self.settings.consecutive_prefill)
        if self.role is PREFILL:
            return PrefillRule.NEVER
        if "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP" in os.environ:
            disabled = _flag("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP")
            return PrefillRule.ALWAYS if disabled else PrefillRule.NEVER
        return PrefillRule.FIRST_TOKEN if self.scheduler.is_generation else PrefillRule.NEVER

    # ------------------------------------------------------------ exit

    def drain_for_exit(self) -> None:
        """Process and stream what is in flight: on a graceful exit, see `drain`."""
        drain(self.scheduler, self._port, self.account, self.settings.exit_timeout_s)

    # ------------------------------------------------------------ what others see

    def report(self) -> dict[str, Any]:
        """The block `zos` of `/server_info`."""
        from zos_sglang.upstream.overlap_off import overlap_rules
        from zos_sglang.upstream.versions import installed

        streams = self._launcher.streams if self._launcher else None
        out: dict[str, Any] = {
            "mode": self.mode,
            "pending_mode": self.pending,
            "role": self.role.name,
            "sglang": installed(),
            "prefill_rule": self.prefill_rule().value,
            "own_launch": bool(self._launcher and self._launcher.own),
            "streams": {
                name: getattr(getattr(streams, name, None), "cuda_stream", None)
                for name in ("schedule", "forward", "copy")
            },
            **self.account.report(),
            "faults": {
                **self.account.faults,
                **{f"lane {step}": times for step, times in self.lane_account.faulted.items()},
                **self.observation.faults,
            },
            "lane": self.lane_account.report(),
            "floor": self.lane_account.floors,
            "steps": self.observation.report(),
        }
        if self.mode == "normal":
            out["overlap_off"] = [rule.as_json() for rule in overlap_rules(self.scheduler.server_args)]
        if self.ranks is not None:
            out["ranks"] = self.ranks.report()
        return out

    def describe(self) -> list[str]:
        """What is in flight, for the stall report. Reads only; called from the watchdog's thread."""
        scheduler, loop = self.scheduler, self.loop
        lines = [f"mode {self.mode}, phase {loop.phase if loop else 'stock loop'}"]
        for batch, result in list(scheduler.result_queue):
            lines.append(f"pending: {describe_batch(batch)}; readback {describe_event(result.copy_done)}")
        if scheduler.cur_batch_for_debug is not None:
            lines.append(f"current: {describe_batch(scheduler.cur_batch_for_debug)}")
        for name in ("schedule", "forward", "copy"):
            stream = getattr(scheduler, f"{name}_stream")
            query = getattr(stream, "query", None)
            lines.append(f"{name} stream: {'no query' if query is None else 'idle' if query() else 'busy'}")
        decided = ", ".join(f"{n}:{reason.value}" for n, reason in list(self.account.decisions))
        lines.append(f"last decisions: {decided or 'none'}")
        if self.ranks is not None:
            lines.append(self.ranks.describe())
        return lines

    def _start_stall_detector(self) -> None:
        self._stall = StallDetector(
            self.settings.stall_timeout_s,
            progress=self._progress,
            busy=self._busy,
            describe=self.describe,
            on_stall=lambda: self.account.passed("stalls"),
            thread_id=threading.get_ident(),
        )
        self._stall.start()

    def _stop_stall_detector(self) -> None:
        if self._stall is not None:
            self._stall.stop()
            self._stall = None

    def _progress(self) -> tuple[int, int]:
        return (self.loop.beat if self.loop else 0, self.scheduler.forward_ct)

    def _busy(self) -> bool:
        loop = self.loop
        if loop is not None:
            # A long intake (new weights, a trace export) stalls nobody while nothing runs.
            if loop.phase == "intake" and not loop.queue:
                return not self.scheduler.running_batch.is_empty()
            return loop.phase not in ("idle", "paused")
        return bool(self.scheduler.result_queue) and not self.scheduler._engine_paused


def _flag(name: str) -> bool:
    from sglang.srt.environ import envs

    return bool(getattr(envs, name).get())


runtime = Runtime()
