"""The checkpoint to be compressed: read strictly, tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bifolio.checkpoint.checkpoint import check_tensors, identity
from bifolio.checkpoint.remap import LANGUAGE_MODEL, GateAndUp, plain_view
from bifolio.checkpoint.safetensors_folder import SafetensorsFolder
from bifolio.checkpoint.source import ModelSource
from bifolio.checkpoint.stored_cache_scales import WithoutScales
from bifolio.checkpoint.stored_weights import StoredWeights
from bifolio.errors import ConfigError
from bifolio.lab.compress.shard_layout import SourceTensor
from bifolio.quant.dequantize import dequantize
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec.families.registry import FAMILIES
from bifolio.spec.quantization import read_quantization

_FLOATS = ("F32", "F16", "BF16")


def not_from_gguf(name: str) -> ConfigError:
    """What a GGUF file is refused with."""
    return ConfigError(
        f"{name} is a GGUF file; compress reads folders in the Hugging Face layout: give the "
        "checkpoint that it was made from"
    )


class SourceModel:
    """Implements `checkpoint.checkpoint.Checkpoint`, and copies what is not compressed.

    Floats are copied as they are stored, other matrices as the bf16 nearest to what they mean.
    """

    def __init__(self, source: ModelSource) -> None:
        """Open a folder in the Hugging Face layout; errors as when a model is loaded."""
        if source.is_gguf:
            raise not_from_gguf(source.name)
        self.path = source.path
        self.spec = source.spec
        self.config: dict[str, Any] = source.config
        self.tensors = FAMILIES[self.spec.architecture](self.spec)
        self._files = SafetensorsFolder(source.path)
        self._view = WithoutScales(plain_view(self._files, self.spec, self.tensors.buffers))
        self._weights = GateAndUp(StoredWeights(self._view, read_quantization(self.config)))
        self.shapes = self._weights.shapes
        check_tensors(self.tensors, self)

    @property
    def prefix(self) -> str:
        """What stands before the names of the language model's tensors in the files."""
        return (
            LANGUAGE_MODEL
            if any(name.startswith(LANGUAGE_MODEL) for name in self._files.shapes)
            else ""
        )

    @property
    def scale_dtype(self) -> str:
        """The type of scales, as safetensors spells it: that of the model, if it has 16 bits."""
        text = self.config.get("text_config") or self.config
        declared = str(text.get("dtype") or text.get("torch_dtype") or "")
        return "F16" if declared.endswith("float16") and "bf" not in declared else "BF16"

    @property
    def held(self) -> dict[str, SourceTensor]:
        """The language model's tensors and the types in which they are copied.

        Biases of zeros that no family has are left out.
        """
        return {
            name: SourceTensor(shape, self._copied(name))
            for name, shape in self.shapes.items()
            if not self.is_ignorable(name)
        }

    @property
    def apart(self) -> dict[str, SourceTensor]:
        """Tensors of other senses and scales of the cache, copied under their full names."""
        stored = self._files
        names = set(self.scale_names)
        if self.prefix:
            others = (name for name in stored.shapes if not name.startswith(LANGUAGE_MODEL))
            names |= {name for name in others if name not in self.shapes}
        return {
            name: SourceTensor(stored.shapes[name], stored.dtypes[name])
            for name in stored.shapes
            if name in names
        }

    @property
    def scale_names(self) -> list[str]:
        """Names of the static scales of the cache, as in the files."""
        return [self.prefix + name for name in self._view.names]

    @property
    def identity(self) -> str:
        """Digest that tells this checkpoint from others."""
        return identity(self.spec, self._files)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each tensor in the files."""
        return {name: self._files.size(name) for name in self._files.shapes}

    def matrix(self, name: str) -> QuantTensor:
        """See `Checkpoint.matrix`."""
        return self._weights.matrix(name)

    def vector(self, name: str) -> Tensor:
        """See `Checkpoint.vector`."""
        return self._weights.vector(name)

    def is_ignorable(self, name: str) -> bool:
        """See `Checkpoint.is_ignorable`."""
        return self._weights.is_ignorable(name)

    def numbers(self, name: str) -> Tensor:
        """What a matrix means: float32 [n, k]."""
        return dequantize(self._weights.matrix(name))

    def copied(self, name: str) -> Tensor:
        """A tensor as it is stored, or in bf16 where it was in codes."""
        if name in self._view.shapes and self._view.dtypes[name] in _FLOATS:
            return self._view.tensor(name)
        if name in self.shapes:
            return self.numbers(name).to(torch.bfloat16)
        return self._files.tensor(name)

    def _copied(self, name: str) -> str:
        dtype = self._view.dtypes.get(name)
        return dtype if dtype in _FLOATS else "BF16"
