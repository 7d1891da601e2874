"""What a model and a cache page are, as frozen values that answer every shape and byte question."""

from bifolio.spec.model import ModelSpec, RopeSpec
from bifolio.spec.page import PAGE_HEADER_BYTES, PageSpec

__all__ = ["PAGE_HEADER_BYTES", "ModelSpec", "PageSpec", "RopeSpec"]
