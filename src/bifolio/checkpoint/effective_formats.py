"""The formats that a model's weights have been given in fact, once `auto` is resolved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bifolio.formats import CacheFormat
from bifolio.kernels.ops import Weight
from bifolio.layers.attention import Attention
from bifolio.layers.decoder import Decoder
from bifolio.layers.mla import MLAttention
from bifolio.layers.mlp import GatedMLP
from bifolio.layers.moe import MoE


@dataclass(frozen=True, slots=True)
class EffectiveFormats:
    """Formats of the layers, of their experts and of the head; several where they differ.

    Not of what follows no plan: routers, and the matrices that latent attention absorbs.
    """

    layers: tuple[str, ...]
    experts: tuple[str, ...]
    head: str

    @classmethod
    def of(cls, decoder: Decoder) -> EffectiveFormats:
        experts = [
            weight
            for layer in decoder.layers
            if isinstance(layer.mlp, MoE)
            for weight in (*layer.mlp.gate_up, *layer.mlp.down)
        ]
        others = [weight for layer in decoder.layers for weight in _others(layer.attention)]
        others += [weight for layer in decoder.layers for weight in _dense(layer.mlp)]
        return cls(_distinct(others), _distinct(experts), str(decoder.head.format))

    def with_cache(self, cache: CacheFormat) -> str:
        """As a plan is spelled, with `experts=` where these differ; `+` between formats."""
        layers, experts = "+".join(self.layers), "+".join(self.experts)
        parts = {"weights": layers, "experts": experts or layers, "head": self.head}
        differing = {key: text for key, text in parts.items() if text != layers}
        if not differing:
            return f"{layers}/{cache}"
        formats = {"weights": layers, "cache": str(cache)} | differing
        return ",".join(f"{key}={text}" for key, text in formats.items())


def _distinct(weights: Iterable[Weight]) -> tuple[str, ...]:
    return tuple(sorted({str(weight.format) for weight in weights}))


def _others(attention: Attention | MLAttention) -> Iterator[Weight]:
    if isinstance(attention, Attention):
        yield from (attention.qkv, attention.output)
    else:
        yield from (attention.q_b, attention.kv_a, attention.output)
        if attention.q_a is not None:
            yield attention.q_a


def _dense(mlp: GatedMLP | MoE) -> Iterator[Weight]:
    gated = mlp.shared if isinstance(mlp, MoE) else mlp
    if gated is not None:
        yield from (gated.gate_up, gated.down)
