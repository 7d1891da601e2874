"""What a worker says of itself in the handshake: which model, which pages."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.disagg.handshake import page_shape
from bifolio.disagg.protocol import PROTOCOL_VERSION, ModelFingerprint, Role, WorkerHello
from bifolio.engine.engine import Engine
from bifolio.errors import CheckpointError, cause_of
from bifolio.formats import Phase
from bifolio.input_files import LARGE_BYTES, read_bytes

REGION = "local"
"""Region of workers that one launcher starts on one host."""

STAGING_BYTES = 64 * 2**20
"""Memory of the staging area of one connection; at least MIN_SLOTS records."""

MIN_SLOTS, MAX_SLOTS = 8, 4096

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def hello_of(engine: Engine, role: Role) -> WorkerHello:
    """The WorkerHello of an engine that serves one half of its requests' lives."""
    spec = engine.pool.spec
    slots = min(max(STAGING_BYTES // spec.page_bytes, MIN_SLOTS), MAX_SLOTS)
    return WorkerHello(
        version=PROTOCOL_VERSION,
        role=role,
        nonce=b"",
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
