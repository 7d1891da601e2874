"""The shape of a model, translated once from a checkpoint's own description."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.spec.blocks import IndexerSpec, MLASpec, MoESpec


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
    """A decoder-only transformer with SwiGLU MLPs.

    Attention is grouped-query, or latent where `mla` is set: then `kv_heads` is 1 (the latent is
    shared) and `head_dim` that of queries and keys. `moe` replaces the MLP by experts from its
    first layer on; `intermediate` is the width of dense MLPs. `indexer` makes attention sparse.
    `mtp_layers` multi-token-prediction layers follow the last layer in the checkpoint; they
    are not served.

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
    mla: MLASpec | None = None
    moe: MoESpec | None = None
    indexer: IndexerSpec | None = None
    mtp_layers: int = 0
