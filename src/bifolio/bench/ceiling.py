"""What a machine could do at best: each term at 100 % of the measured bandwidth or peak.

    linear      max(bytes of codes and scales / bandwidth, 2 · rows · n · k / peak)
    attention   max(bytes of cache read / bandwidth, 4 · heads · head_dim · pairs / bf16 peak)
    time        the sum over all linears, the head and the attention of every layer

`pairs` counts (query, key) pairs under the causal mask. Activations are left out: they stay in the
processor's caches. Rows that share a step share the reading of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.formats import CacheFormat, WeightFormat
from bifolio.spec import ModelSpec, PageSpec


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured in the same run: bytes/s read from memory, multiply-add operations/s (2 each)."""

    read_bytes: float
    bf16_ops: float
    int8_ops: float

    def peak(self, weights: WeightFormat) -> float:
        return self.int8_ops if weights.int8_activations else self.bf16_ops


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Lower bounds of time for one model in one pair of formats."""

    machine: Machine
    model: ModelSpec
    weights: WeightFormat
    head: WeightFormat
    cache: CacheFormat
    page_size: int = 16

    def _linears(self) -> list[tuple[int, int]]:
        m = self.model
        qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
        return [
            (qkv, m.hidden),
            (m.hidden, m.heads * m.head_dim),
            (2 * m.intermediate, m.hidden),
            (m.hidden, m.intermediate),
        ]

    def _linear_seconds(self, n: int, k: int, rows: int, fmt: WeightFormat) -> float:
        reading = fmt.nbytes(n, k) / self.machine.read_bytes
        return max(reading, 2.0 * rows * n * k / self.machine.peak(fmt))

    def _attention_seconds(self, cache_tokens: float, pairs: float) -> float:
        spec = PageSpec.of(self.model, self.cache, self.page_size)
        reading = cache_tokens * spec.token_bytes / self.machine.read_bytes
        operations = 4.0 * self.model.layers * self.model.heads * self.model.head_dim * pairs
        return max(reading, operations / self.machine.bf16_ops)

    def step_seconds(self, rows: int, logits: int, cache_tokens: float, pairs: float) -> float:
        """One pass over `rows` tokens, `logits` of which meet the head.

        `cache_tokens` tokens are read from the cache; `pairs` are multiplied.
        """
        layer = sum(self._linear_seconds(n, k, rows, self.weights) for n, k in self._linears())
        head = self._linear_seconds(self.model.vocab, self.model.hidden, logits, self.head)
        return self.model.layers * layer + head + self._attention_seconds(cache_tokens, pairs)

    def decode_seconds(self, rows: int, prompt: int, output: int) -> float:
        """`rows` requests generate tokens 2 … output together behind prompts of `prompt` tokens."""
        steps = output - 1
        context = prompt + 1 + steps / 2
        return steps * self.step_seconds(rows, rows, rows * context, rows * context)

    def prefill_seconds(self, rows: int, prompt: int, step_tokens: int) -> float:
        """`rows` prompts of `prompt` tokens, in steps of `step_tokens`, one logit each."""
        tokens, pairs = rows * prompt, rows * prompt * (prompt + 1) / 2
        steps = max(1, round(tokens / step_tokens))
        each = tokens // steps
        return steps * self.step_seconds(each, max(1, rows // steps), tokens, pairs / steps)
