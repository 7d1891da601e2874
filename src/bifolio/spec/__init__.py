"""What a model and a cache page are, as frozen values that answer every shape and byte question."""

from bifolio.spec.blocks import IndexerSpec, MLASpec, MoESpec, RouterSpec, Scoring
from bifolio.spec.model import ModelSpec, RopeSpec
from bifolio.spec.page import PAGE_HEADER_BYTES, PageSpec

__all__ = [
    "PAGE_HEADER_BYTES",
    "IndexerSpec",
    "MLASpec",
    "MoESpec",
    "ModelSpec",
    "PageSpec",
    "RopeSpec",
    "RouterSpec",
    "Scoring",
]
