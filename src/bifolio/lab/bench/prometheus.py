"""Reads what bifolio, vLLM, SGLang and llama.cpp show at /metrics, by their own names."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from bifolio.lab.bench.target import Counters, Gauges

_QUERIES = (
    "bifolio_prefix_cache_queries_total",
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",
    "sglang:prompt_tokens_total",
)
_HITS = (
    "bifolio_prefix_cache_hits_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
)
_LLAMA_HITS = "llamacpp:prompt_tokens_cached_total"
_LLAMA_COMPUTED = "llamacpp:prompt_tokens_total"
"""Without those that came from the cache."""
_PREEMPTIONS = (
    "bifolio_num_preemptions_total",
    "vllm:num_preemptions_total",
    "sglang:num_retractions_total",
)
_RUNNING = (
    "bifolio_num_requests_running",
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
)
_WAITING = (
    "bifolio_num_requests_waiting",
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
)
_USAGE = (
    "bifolio_kv_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_CAPACITY = ("sglang:max_total_num_tokens",)


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """One look at a server."""

    counters: Counters
    gauges: Gauges
    cache_tokens: int | None


def read_metrics(text: str) -> ScrapedMetrics:
    """Pick what a benchmark needs; over several engines of a server it is added up."""
    sums: dict[str, float] = {}
    capacity: int | None = None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            labels = sample.labels
            if sample.name == "vllm:cache_config_info" and "num_gpu_blocks" in labels:
                capacity = _product(labels["num_gpu_blocks"], labels.get("block_size", ""))

    def first(names: tuple[str, ...]) -> float | None:
        return next((sums[name] for name in names if name in sums), None)

    total, queries, hits = first(_CAPACITY), first(_QUERIES), first(_HITS)
    if queries is None and _LLAMA_HITS in sums:
        hits = sums[_LLAMA_HITS]
        queries = hits + sums[_LLAMA_COMPUTED]
    return ScrapedMetrics(
        Counters(queries, hits, first(_PREEMPTIONS)),
        Gauges(first(_RUNNING), first(_WAITING), first(_USAGE)),
        capacity if total is None else int(total),
    )


def _product(*texts: str) -> int | None:
    product = 1
    for text in texts:
        if not text.isdigit():
            return None
        product *= int(text)
    return product
