"""The shape of a model, translated once from a checkpoint's own description."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `kind` is `default`, `llama3`, `yarn` or `factors`.

    `dim` numbers of each head rotate. The fields after `kind` are read by the kinds that name
    them; meanings as in the `rope_scaling` dictionary of a Hugging Face `config.json`. `factors`
    (GGUF) divides the frequency of each pair by its own factor.
    """

    theta: float = 10_000.0
    dim: int = 0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention and a SwiGLU MLP.

    `windows[i]` is the sliding window of layer i in tokens, the current one included, or None
    for full attention. `stop_ids` are the end tokens that the checkpoint declares.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
