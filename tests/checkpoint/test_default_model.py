"""The default model, read from its GGUF file, against `transformers` on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bifolio.checkpoint.gguf_model import GGUFCheckpoint
from bifolio.checkpoint.load import LoadedModels, load_models
from bifolio.checkpoint.source import ModelSource, resolve_source
from bifolio.cli.plan_model import PlannedModel, find_model
from bifolio.formats import PrecisionPlan
from bifolio.kernels.ops import Weight
from bifolio.kernels.reference import ReferenceOps
from bifolio.quant.dequantize import dequantize
from bifolio.quant.quant_tensor import QuantTensor
from bifolio.spec.weights import Kind
from support.forward import PagedRun
from support.gguf_files import NAMES

BOUND = 2e-3
"""On logits of size about 20: float32 sums over 30 layers, in another order."""


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_source("smollm2-135m")


@pytest.fixture(scope="module")
def ours(source: ModelSource) -> LoadedModels:
    return load_models(source, PrecisionPlan.parse("fp32/fp32"), ReferenceOps(), positions=1024)


@pytest.fixture(scope="module")
def judged(source: ModelSource) -> dict[str, torch.Tensor]:
    return dict(_judged(source))


def _judged(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    """What the `gguf` package reads, rows of q and k brought back to the order of halves."""
    names = {stored: name for name, stored in NAMES.items()}
    for tensor in gguf.GGUFReader(source.path).tensors:
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        part, _, kind = tensor.name.rpartition(".")
        if part.startswith("blk."):
            _, layer, inner = part.split(".")
            if inner in ("attn_q", "attn_k"):
                values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(values.shape)
            yield f"model.layers.{layer}.{names[inner]}.{kind}", values
        else:
            yield f"{names[part]}.{kind}", values


@pytest.fixture(scope="module")
def judge(judged: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    weights = judged | {"lm_head.weight": judged["model.embed_tokens.weight"]}
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    return model.eval()


@pytest.mark.parametrize("length", [5, 33, 150])
@torch.no_grad()
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    length: int, ours: LoadedModels, judge: LlamaForCausalLM
) -> None:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(100, 49152, (length,), generator=generator).tolist()
    run = PagedRun(ours.decode)
    logits = run.step({"a": ids})["a"]
    wanted = judge(torch.tensor([ids]), use_cache=True)
    assert (logits - wanted.logits[0]).abs().max() < BOUND
    cache, next_ours, next_judge = wanted.cache, logits[-1], wanted.logits[0, -1]
    for _ in range(8):
        token = int(next_judge.argmax())
        assert int(next_ours.argmax()) == token
        next_ours = run.step({"a": [token]})["a"][-1]
        step = judge(torch.tensor([[token]]), cache=cache, use_cache=True)
        next_judge = step.logits[0, -1]
        assert (next_ours - next_judge).abs().max() < BOUND


def test_it_is_planned_in_the_formats_of_its_file(source: ModelSource) -> None:
    """The preset, which looks at no file, and the file itself."""
    preset, file = find_model("smollm2-135m"), find_model(str(source.path))
    assert _formats(preset) == _formats(file)


def _formats(model: PlannedModel) -> dict[Kind, set[str]]:
    formats: dict[Kind, set[str]] = {}
    for matrix in model.stored.served(model.spec).matrices:
        formats.setdefault(matrix.kind, set()).add(str(model.stored.of(matrix)))
    return formats


def test_its_bits_are_kept(source: ModelSource, judged: dict[str, torch.Tensor]) -> None:
    """Q4_1 and Q8_0 load losslessly: every number equals the judge's, in the file's own size."""
    checkpoint = GGUFCheckpoint(source.gguf, source.spec)
    formats: dict[str, int] = {}
    for name, values in judged.items():
        if values.ndim == 2:
            weight = checkpoint.matrix(name)
            assert torch.equal(dequantize(weight), values)
            assert weight.format.nbytes(weight.n, weight.k) == checkpoint.size(name)
            formats[str(weight.format)] = formats.get(str(weight.format), 0) + 1
    assert formats == {"int8:g32": 1, "int4:g32:z": 210}


class _Sizes(ReferenceOps):
    """Adds up what native kernels would keep."""

    def __init__(self) -> None:
        self.nbytes = 0

    def prepare(self, weight: QuantTensor, bias_n: torch.Tensor | None = None) -> Weight:
        self.nbytes += weight.format.nbytes(weight.n, weight.k)
        small = QuantTensor(weight.format, 0, weight.k, weight.codes[:0], *_none(weight))
        return super().prepare(small, bias_n)


def _none(weight: QuantTensor) -> list[torch.Tensor | None]:
    return [None if part is None else part[:0] for part in (weight.scales, weight.offsets)]


def test_auto_takes_it_as_it_is_stored(source: ModelSource) -> None:
    ops = _Sizes()
    load_models(source, PrecisionPlan(), ops, positions=16)
    matrices = [t for t in source.gguf.tensors.values() if len(t.shape) == 2]
    assert ops.nbytes == sum(tensor.nbytes for tensor in matrices)
