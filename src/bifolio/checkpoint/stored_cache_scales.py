"""The `k_scale` and `v_scale` that checkpoints bring for an fp8 cache.

    model.layers.0.self_attn.k_scale      as compressed-tensors, vLLM and `bifolio calibrate` write
    model.layers.0.self_attn.k_proj.k_scale, ….k_proj.output_scale      older writers

One number for a layer, or one for each of its KV heads. Latent attention has the scale of its
latents in `k_scale`; its `v_scale` is not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from bifolio.checkpoint.tensor_files import TensorFiles
from bifolio.errors import CheckpointError
from bifolio.kernels.cache_scales import CacheScales
from bifolio.spec import ModelSpec

_NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:(k|v)_scale|(k|v)_proj\.(?:\3_scale|output_scale))"
)


class WithoutScales:
    """Implements `TensorFiles`: all tensors but the scales, which `scales` gives."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._named: dict[tuple[str, int], str] = {}
        for name in files.shapes:
            if found := _NAME.fullmatch(name):
                key = (found[2] or found[3], int(found[1]))
                first = self._named.setdefault(key, name)
                if first != name:
                    raise CheckpointError(f"{first} and {name} are both there, for the same scale")
        left_out = set(self._named.values())
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: shape for name, shape in files.shapes.items() if name not in left_out
        }
        self.dtypes: Mapping[str, str] = {name: files.dtypes[name] for name in self.shapes}

    @property
    def names(self) -> list[str]:
        """Names of the scales."""
        return list(self._named.values())

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def scales(self, spec: ModelSpec) -> CacheScales | None:
        """All of them, None if there are none; CheckpointError names one that is missing or bad."""
        served = {key for key in self._named if key[1] < spec.layers}
        if not served:
            return None
        heads = 1 if spec.mla else spec.kv_heads
        k_lh = self._layers("k", spec.layers, heads)
        return CacheScales(k_lh, k_lh if spec.mla else self._layers("v", spec.layers, heads))

    def _layers(self, which: str, layers: int, heads: int) -> Tensor:
        return torch.stack([self._layer(which, layer, heads) for layer in range(layers)])

    def _layer(self, which: str, layer: int, heads: int) -> Tensor:
        name = self._named.get((which, layer))
        if name is None:
            raise CheckpointError(
                f"model.layers.{layer}.self_attn.{which}_scale is missing, although other layers "
                "have such scales of the cache"
            )
        scale_h = self._files.tensor(name).to(torch.float32).flatten()
        if scale_h.numel() not in (1, heads):
            raise CheckpointError(
                f"{name} holds {scale_h.numel()} numbers; one for the layer or {heads} for its KV "
                "heads can be read"
            )
        if not bool((scale_h.isfinite() & (scale_h > 0)).all()):
            raise CheckpointError(f"{name} must be positive and finite, not {scale_h.tolist()}")
        return scale_h.expand(heads)
