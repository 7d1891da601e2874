"""What a worker says of itself, and whether two can hand requests to each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.disagg.protocol import (
    PROTOCOL_VERSION,
    ModelFingerprint,
    PageShape,
    Role,
    WorkerHello,
)
from bifolio.engine.engine import Engine
from bifolio.errors import CheckpointError, ConfigError, PairError, UnsupportedError, cause_of
from bifolio.formats import CacheFormat, Phase
from bifolio.input_files import LARGE_BYTES, read_bytes
from bifolio.spec import PageSpec
from bifolio.spec.page import PAGE_SIZES, LatentShape

REGION = "local"
"""Region of workers that one launcher starts on one host."""

STAGING_BYTES = 64 * 2**20
"""Memory of the staging area of one connection; at least 8 records, at most 4,096."""

MAX_SLOTS = 1 << 16
_MAX_SIZE = 1 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two Hellos come to: both sides work it out alone and compare its name."""

    source: PageSpec
    """Pages of the prefill side."""
    target: PageSpec
    """Pages of the decode side, which are also those on the wire."""
    writer: int
    """Writer of the pages that arrive: whose they were, and what they have been turned into."""
    scales: tuple[bytes, bytes]
    """Static scales of both sides."""
    slots: int
    max_tokens: int

    @property
    def name(self) -> str:
        """Codec and specs as text, for Ready, root digests and logs."""
        return (
            f"{codec_name(self.source, self.target)} "
            f"{self.source.fingerprint}>{self.target.fingerprint} {self.writer:016x}"
        )


def hello_of(engine: Engine, role: Role) -> WorkerHello:
    """The WorkerHello of an engine that serves one half of its requests' lives."""
    spec = engine.pool.spec
    slots = min(max(STAGING_BYTES // spec.page_bytes, 8), 4096)
    return WorkerHello(
        version=PROTOCOL_VERSION,
        role=role,
        boot_epoch=engine.boot_epoch,
        region=REGION,
        model=model_print(resolve_source(engine.model), engine.models.identity),
        page=page_shape(spec),
        writer=engine.writer(Phase.PREFILL) if role is Role.PREFILL else 0,
        scales=b"" if engine.pool.scales is None else engine.pool.scales.as_bytes(),
        slots=slots if role is Role.DECODE else 0,
        max_tokens=engine.max_model_len,
    )


def model_print(source: ModelSource, weights: str) -> ModelFingerprint:
    """Digests of a model's shape and tokenizer beside that of its source's weights.

    `weights` names those that were loaded (`models.identity`); a compressed checkpoint says itself
    what it was made from.
    """
    shape = replace(source.spec, stop_ids=())
    return ModelFingerprint(
        config=hashlib.sha256(repr(shape).encode()).hexdigest(),
        tokenizer=_tokenizer_digest(source),
        weights=source.origin or weights,
    )


def _tokenizer_digest(source: ModelSource) -> str:
    digest = hashlib.sha256()
    if source.is_gguf:
        for key in sorted(source.gguf.metadata):
            if key.startswith("tokenizer."):
                digest.update(f"{key}={source.gguf.metadata[key]!r}\n".encode())
        return digest.hexdigest()
    for name in _TOKENIZER_FILES:
        path = Path(source.path, name)
        digest.update(name.encode())
        try:
            digest.update(read_bytes(path, LARGE_BYTES))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {cause_of(error)}") from error
    return digest.hexdigest()


def page_shape(spec: PageSpec) -> PageShape:
    """A page spec as a WorkerHello carries it."""
    latent = spec.latent
    return PageShape(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        cache=str(spec.cache),
        page_size=spec.page_size,
        rank=spec.rank,
        world=spec.world,
        kv_lora=latent.kv_lora if latent else 0,
        rope=latent.rope if latent else 0,
        index_dim=latent.index_dim if latent else 0,
        index_layers=latent.index_layers if latent else (),
        fingerprint=spec.fingerprint,
    )


def page_spec(shape: PageShape) -> PageSpec:
    """The page spec that a peer describes; PairError if it is none, or not what its print says."""
    sizes = [shape.layers, shape.kv_heads, shape.head_dim, shape.world]
    latent = None
    if shape.kv_lora:
        latent = LatentShape(shape.kv_lora, shape.rope, shape.index_dim, shape.index_layers)
        sizes += [shape.kv_lora, shape.rope]
    if not all(0 < size <= _MAX_SIZE for size in sizes) or shape.page_size not in PAGE_SIZES:
        raise PairError(f"the peer describes pages that cannot be: {shape}")
    try:
        cache = CacheFormat.parse(shape.cache)
    except ConfigError as error:
        raise PairError(f"the peer's cache: {error}") from None
    spec = PageSpec(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        cache=cache,
        page_size=shape.page_size,
        rank=shape.rank,
        world=shape.world,
        latent=latent,
    )
    if spec.fingerprint != shape.fingerprint:
        raise PairError(
            f"the peer lays out such pages in another way (its fingerprint is {shape.fingerprint}, "
            f"ours would be {spec.fingerprint}); run the same version on both sides"
        )
    return spec


def codec_name(source: PageSpec, target: PageSpec) -> str:
    """Such as `bf16>fp8:token 16>32`; UnsupportedError if no such conversion exists."""
    for what in ("layers", "kv_heads", "head_dim", "rank", "world", "latent"):
        one, other = getattr(source, what), getattr(target, what)
        if one != other:
            raise UnsupportedError(
                f"pages with {what}={one} cannot become pages with {what}={other}; "
                "formats and page sizes may differ, shapes and ranks may not"
            )
    return f"{source.cache}>{target.cache} {source.page_size}>{target.page_size}"


def handed_writer(
    writer: int, source: PageSpec, target: PageSpec, source_scales: bytes, target_scales: bytes
) -> int:
    """64-bit fingerprint of pages that `writer` wrote in `source` and a codec made into `target`.

    Pages that are handed over without a change keep their writer, so that both sides know them by
    the same key. The scales of the source are part of `writer` already. Never 0.
    """
    if source.fingerprint == target.fingerprint and source_scales == target_scales:
        return writer
    text = f"{writer}|{source.fingerprint}|{target.fingerprint}|{target_scales.hex()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1


def agree(mine: WorkerHello, theirs: WorkerHello) -> Agreement:
    """Compare two Hellos; PairError names the first thing that keeps them apart, and a hint."""
    prefill, decode = (mine, theirs) if mine.role is Role.PREFILL else (theirs, mine)
    _must_equal("protocol version", mine.version, theirs.version, "run the same version")
    if mine.version != PROTOCOL_VERSION:
        raise PairError(f"protocol version {mine.version} is not {PROTOCOL_VERSION}")
    if (prefill.role, decode.role) != (Role.PREFILL, Role.DECODE):
        raise PairError(f"both workers are {mine.role}; connect a prefill with a decode worker")
    _must_equal("region", prefill.region, decode.region, "prompts stay in their region")
    for name in ("config", "tokenizer", "weights"):
        _must_equal(
            f"model {name}",
            getattr(prefill.model, name),
            getattr(decode.model, name),
            "both must come from the same source model, in any formats",
        )
    if prefill.writer == 0:
        raise PairError("the peer's WorkerHello is malformed")
    if not 0 < decode.slots <= MAX_SLOTS:
        raise PairError(f"the decode worker has {decode.slots} staging slots, not 1 to {MAX_SLOTS}")
    source, target = page_spec(prefill.page), page_spec(decode.page)
    try:
        codec_name(source, target)
    except UnsupportedError as error:
        raise PairError(str(error)) from None
    for spec, scales in ((source, prefill.scales), (target, decode.scales)):
        _check_scales(spec, scales)
    return Agreement(
        source=source,
        target=target,
        writer=handed_writer(prefill.writer, source, target, prefill.scales, decode.scales),
        scales=(prefill.scales, decode.scales),
        slots=decode.slots,
        max_tokens=min(prefill.max_tokens, decode.max_tokens),
    )


def _must_equal(what: str, one: object, other: object, hint: str) -> None:
    if one != other:
        raise PairError(f"{what} differs: {one!r} is not {other!r}; {hint}")


def _check_scales(spec: PageSpec, scales: bytes) -> None:
    if not scales:
        return
    if not spec.cache.static_scales:
        raise PairError(f"a {spec.cache} cache has no static scales, but some were sent")
    count = 2 * spec.layers * spec.kv_heads
    if len(scales) != 4 * count:
        raise PairError(f"{len(scales)} bytes of static scales are not {count} numbers")
    numbers = np.frombuffer(scales, np.dtype("<f4"))
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise PairError("static scales must be positive and finite")
