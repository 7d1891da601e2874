"""The engine: a scheduler that decides, a runner that computes, one step at a time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from bifolio.cache.manager import CacheManager
from bifolio.cache.page_pool import PagePool
from bifolio.cache.stamps import PageFault
from bifolio.checkpoint.builtin import home
from bifolio.checkpoint.effective_formats import EffectiveFormats
from bifolio.checkpoint.gguf import KEPT
from bifolio.checkpoint.load import LoadedModels, load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.checkpoint.token_ids import token_ids
from bifolio.config import EngineConfig, size_text
from bifolio.engine.messages import EngineInfo
from bifolio.engine.peers import Peers
from bifolio.engine.recorded import RecordedModel, StepModel
from bifolio.engine.runner import ModelRunner, RunnerLimits, Tamper
from bifolio.engine.sampler import Sampler
from bifolio.errors import ConfigError, cause_of
from bifolio.formats import Phase
from bifolio.kernels.cache_scales import CacheScales
from bifolio.kernels.select import KernelSet, select_kernels
from bifolio.pages.kv_pool import KVPool
from bifolio.pages.provenance import writer_fingerprint
from bifolio.pages.scrub import Scrubber
from bifolio.request import Output, Request, check_prompt_ids
from bifolio.scheduler.limits import SchedulerLimits
from bifolio.scheduler.scheduler import Scheduler
from bifolio.scheduler.step import Step
from bifolio.spec import ModelSpec, PageSpec
from bifolio.stats import EngineStats

SURVEYED_AT_A_TIME = 16
"""Mapped experts looked at between two heartbeats: a few milliseconds."""

_MIB = 2**20

log = structlog.get_logger(__name__)

Progress = Callable[[str, int, int], None]
"""Called while the engine is built: stage, units done, units in total."""


class Engine:
    """Serves one model in one process. Not thread-safe: one thread adds, aborts and steps.

    `tamper` (`engine.runner`) and `kernels` (in place of those of the configuration) are for fault
    injection.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress = lambda _stage, _done, _total: None,
        tamper: Tamper | None = None,
        kernels: KernelSet | None = None,
    ) -> None:
        self._config = config
        self._stalled = False
        source = resolve_source(config.model)
        self.spec, self.tokens = source.spec, token_ids(source)
        page = PageSpec.of(self.spec, config.plan.prefill.cache, config.plan.page_size)
        pages = page.pages_in(config.cache_memory)
        if pages < 1:
            raise ConfigError(
                f"--cache-memory {size_text(config.cache_memory)} holds no page of "
                f"{size_text(page.page_bytes)}; give more memory or a smaller page="
            )
        self.max_model_len = _model_len(config, self.spec, page)
        self.kernels = kernels or select_kernels(config.kernels, config.threads)
        self.models = load_models(
            source,
            config.plan,
            self.kernels.ops,
            positions=self.max_model_len,
            experts=home() / "experts" if config.experts == "mapped" else None,
            expert_memory=config.expert_memory,
            progress=lambda done, total: progress("weights", done, total),
        )
        self.formats = {p: EffectiveFormats.of(self.models.phase(p).decoder) for p in Phase}
        self.pool = _pool(page, pages, self.models.cache_scales)
        self._page_pool = PagePool(pages)
        limits = SchedulerLimits(
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_waiting=config.max_waiting,
        )
        _warn_of_unit_scales(self.pool)
        _tell_widened(self.models.widened)
        self.scheduler = Scheduler(self._cache_manager(), limits, self.spec.stop_ids)
        self.runner = ModelRunner(
            _runnable(self.models, self.kernels),
            self.pool,
            Sampler(self.kernels.sampling, self.spec.stop_ids, self.tokens),
            RunnerLimits(config.max_step_tokens, config.max_num_seqs, self.max_model_len),
            page_kernels=self.kernels.pages,
            integrity=config.integrity,
            tamper=tamper,
        )
        seals = self.runner.seals
        self._scrubber = Scrubber(self.scheduler.cache, seals) if seals else None

    def writer(self, phase: Phase) -> int:
        """Fingerprint of what writes pages in a phase (`pages.provenance`)."""
        formats = self.formats[phase]
        weights = f"{formats.layers} {formats.experts} {self.kernels.ops.name}"
        scales = "one" if self.pool.scales is None else self.pool.scales.digest
        return writer_fingerprint(
            self.models.identity, weights, formats.head, self.pool.spec, scales, 0
        )

    def _cache_manager(self) -> CacheManager:
        return CacheManager(
            self._page_pool,
            self.pool.spec.page_size,
            self.writer(Phase.PREFILL),
            self.writer(Phase.DECODE),
            prefix_cache=self._config.prefix_cache,
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Put a request in line; RequestError or OverloadedError refuse it."""
        check_prompt_ids(request.prompt_ids, self.spec.vocab)
        request.sampling.check(self.spec.vocab)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages before the next step; unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def step(self) -> list[Output]:
        """Compute one batch and say what came of it. A failing step ends its own requests only."""
        step = self.scheduler.schedule()
        if step is None:
            return self.scheduler.drain_outputs()
        self._planned(step)
        try:
            results = self.runner.execute(step)
        except Exception as error:
            log.exception("step failed", rows=[row.request_id for row in step.rows])
            return self.scheduler.fail(step, f"the engine failed: {type(error).__name__}: {error}")
        for row, result in zip(step.rows, results, strict=True):
            if result.fault is not None:
                is_page = isinstance(result.fault, PageFault)
                what = "cache integrity" if is_page else "logits that are not finite"
                log.error(what, request=row.request_id, fault=result.fault)
        return self.scheduler.commit(step, results)

    def _planned(self, step: Step) -> None:
        """A step is about to be executed."""

    def on_heartbeat(self, heartbeat: Callable[[], None]) -> None:
        """Have `heartbeat` called whenever a step has come some way."""
        self.kernels.ops.heartbeat = heartbeat

    def scrub(self) -> None:
        """Look whether a few cached pages still hold the bytes they were sealed with.

        And how much of a few mapped experts is in memory.
        """
        if self._scrubber is not None:
            self._scrubber.look()
        if self.models.experts is not None:
            self.models.experts.survey(SURVEYED_AT_A_TIME)

    def hello(self) -> EngineInfo:
        """Describe the engine."""
        return EngineInfo(
            model=self._config.model,
            vocab=self.spec.vocab,
            max_model_len=self.max_model_len,
            stop_ids=self.spec.stop_ids,
            page_size=self.pool.spec.page_size,
            pages=self.pool.pages,
            page_bytes=self.pool.spec.page_bytes,
            plan=self.plan,
            experts=self._experts_text(),
            kernels=str(self.kernels),
            boot_epoch=self._page_pool.epoch,
            model_positions=self.spec.max_position,
            model_bytes=_memory_for(self.pool.spec, self.spec.max_position),
        )

    @property
    def plan(self) -> str:
        """The plan with the formats that the weights have been given: `auto` is resolved."""
        sides = [
            self.formats[phase].with_cache(self._config.plan.phase(phase).cache) for phase in Phase
        ]
        return f"{' → '.join(dict.fromkeys(sides))} page={self.pool.spec.page_size}"

    def _experts_text(self) -> str:
        mapped = self.models.experts
        if mapped is None:
            return ""
        mapped.survey()
        return (
            f"{mapped.count:,} mapped from {mapped.folder}: {mapped.nbytes:,} bytes, "
            f"{mapped.resident:,} of them in memory; {self.models.nbytes:,} bytes of other weights"
        )

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; the log hears of it when nothing moves any more."""
        stats, seals, mapped = self.scheduler.stats(), self.runner.seals, self.models.experts
        stalled = self.scheduler.stalled()
        if stalled is not None and not self._stalled:
            log.error("no progress", state=stalled)
        self._stalled = stalled is not None
        return msgspec.structs.replace(
            stats,
            seals_checked=seals.checked if seals else 0,
            seal_failures=seals.failures if seals else 0,
            weight_bytes=self.models.nbytes,
            expert_bytes_mapped=mapped.nbytes if mapped else 0,
            expert_bytes_resident=mapped.resident if mapped else 0,
        )

    @property
    def model(self) -> str:
        """What the configuration calls the model."""
        return self._config.model

    @property
    def boot_epoch(self) -> int:
        """A random number of this engine: the upper bits of the tags of its pages."""
        return self._page_pool.epoch

    @property
    def peers(self) -> Peers | None:
        """This engine computes both phases of its requests."""
        return None

    def close(self) -> None:
        """Nothing is held beyond this object's memory and its kernels' threads."""


def create(config: EngineConfig, progress: Progress) -> Engine:
    """The factory that the engine process calls."""
    return Engine(config, progress)


def _pool(page: PageSpec, pages: int, scales: CacheScales | None) -> KVPool:
    try:
        return KVPool(page, pages, scales if page.cache.static_scales else None)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the system gives no {size_text(pages * page.page_bytes)} for the cache "
            f"({cause_of(error)}); ask for less with --cache-memory"
        ) from error


def _model_len(config: EngineConfig, spec: ModelSpec, page: PageSpec) -> int:
    """Most tokens of a request: as configured, else what the model and the pool both allow."""
    asked, pool_tokens = config.max_model_len, page.pages_in(config.cache_memory) * page.page_size
    if asked > spec.max_position:
        raise ConfigError(
            f"--max-model-len {asked} is beyond the {spec.max_position} positions that the model "
            "knows; ask for no more than those"
        )
    if asked > pool_tokens:
        raise ConfigError(
            f"--max-model-len {asked} is beyond the {pool_tokens} tokens that --cache-memory "
            f"{size_text(config.cache_memory)} holds; give --cache-memory "
            f"{size_text(_memory_for(page, asked))} or ask for less"
        )
    return asked or min(spec.max_position, pool_tokens)


def _memory_for(page: PageSpec, tokens: int) -> int:
    """Bytes of a pool that holds `tokens` tokens, in whole MiB."""
    return -(-page.pages_for(tokens) * page.page_bytes // _MIB) * _MIB


def _warn_of_unit_scales(pool: KVPool) -> None:
    if pool.spec.cache.static_scales and pool.scales is None:
        log.warning(
            "the fp8 cache has no calibrated scales, so 1.0 is used",
            hint="make some with `bifolio calibrate`, or take cache=fp8:token",
        )


def _tell_widened(types: tuple[str, ...]) -> None:
    changes = []
    if without := [name for name in types if name not in KEPT]:
        changes.append(f"weights stored as {', '.join(without)}, which no format of ours holds")
    if mixed := [name for name in types if name in KEPT]:
        changes.append(
            f"those stored as {', '.join(mixed)} where one matrix (q, k and v; gate and up) has "
            "more types"
        )
    if changes:
        log.info(
            f"kept as bf16: {'; '.join(changes)}",
            hint="--plan int8 (or another format) takes less memory",
        )


def _runnable(models: LoadedModels, kernels: KernelSet) -> dict[Phase, StepModel]:
    """The model of each phase, its decode steps recorded where the kernels can; one if equal."""
    plain = {phase: models.phase(phase) for phase in Phase}
    if kernels.recorder is None or not all(model.recordable for model in plain.values()):
        return dict(plain)
    recorded = {id(m): RecordedModel(m, kernels.recorder) for m in plain.values()}
    return {phase: recorded[id(m)] for phase, m in plain.items()}
