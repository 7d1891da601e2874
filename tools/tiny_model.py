"""The small trained model's shape, its tokenizer, a faster loop over experts, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

from tiny_tasks import BOS, END, MARKS, PAD

BLOCK = 256  # queries per block of attention
VOCABULARY = 264  # 256 bytes, the marks, and two rows that are never used
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def config() -> DeepseekV3Config:
    """4.7 M parameters: three layers, the first dense; 32 experts, four per token, one shared."""
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        n_routed_experts=32,
        n_shared_experts=1,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_interleave=True,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
        initializer_range=0.05,
    )


def build(seed: int) -> DeepseekV3ForCausalLM:
    """A new model in fp32 with weights drawn from `seed`."""
    torch.manual_seed(seed)
    shape = config()
    model = DeepseekV3ForCausalLM(shape)
    look_back(model)
    model.set_attn_implementation("blockwise")
    model.config._experts_implementation = "sorted_mm"
    return model.float()


@torch.no_grad()
def look_back(model: DeepseekV3ForCausalLM) -> None:
    """Let heads of the first layer begin as ones that look 1, 2, 3, ... tokens back.

    Copying needs them, random strings teach them slowly, and training is free to change them. One
    number of the embedding begins equal for all tokens; from it the rotated parts of queries and
    keys are made, so that the score of a token d back is a sum of cosines with its peak at d = h.
    """
    model.model.embed_tokens.weight[:, 0] = 0.2  # about 3.8 after the norm
    shape, attention = model.config, model.model.layers[0].self_attn
    rotated = shape.qk_rope_head_dim
    attention.kv_a_proj_with_mqa.weight[-rotated:] = 0
    attention.q_a_proj.weight[0] = 0
    attention.q_a_proj.weight[0, 0] = 1
    by_head = attention.q_b_proj.weight.view(shape.num_attention_heads, -1, shape.q_lora_rank)
    for pair in range(4):
        frequency = 10000.0 ** (-2 * pair / rotated)
        attention.kv_a_proj_with_mqa.weight[2 * pair - rotated, 0] = 2
        for back, head in enumerate(by_head[:-1], start=1):
            if pair == 0:
                head[: shape.qk_nope_head_dim] *= 0.1
                head[-rotated:] = 0
            head[2 * pair - rotated, 0] = 1.5 * math.cos(frequency * back)
            head[2 * pair + 1 - rotated, 0] = -1.5 * math.sin(frequency * back)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids in the order of the byte-level alphabet), and the marks."""
    letters = _byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=MARKS[0],
        bos_token=MARKS[1],
        eos_token=MARKS[4],
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (the form of GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


class _GroupedLinear(torch.autograd.Function):
    """`rows[a:b] @ weight[expert].T` for the rows of each expert, one matrix product each."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, ends: list[int]) -> Tensor:  # type: ignore
        ctx.save_for_backward(rows, weight)
        ctx.ends = ends
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for expert, (start, end) in enumerate(_spans(ends)):
            torch.mm(rows[start:end], weight[expert].t(), out=out[start:end])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for expert, (start, end) in enumerate(_spans(ctx.ends)):
            torch.mm(grad[start:end], weight[expert], out=grad_rows[start:end])
            torch.mm(grad[start:end].t(), rows[start:end], out=grad_weight[expert])
        return grad_rows, grad_weight, None


def _spans(ends: list[int]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1]], ends, strict=True)


def sorted_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts over (tokens, hidden), tokens sorted by expert: one product per expert."""
    top_k = top_k_index.shape[-1]
    _, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts)
    ends = counts.cumsum(0).tolist()
    token = order // top_k
    rows = hidden_states.index_select(0, token)
    gate, up = _GroupedLinear.apply(rows, self.gate_up_proj.to(rows.dtype), ends).chunk(2, dim=-1)
    inner = nn.functional.silu(gate) * up
    out = _GroupedLinear.apply(inner, self.down_proj.to(rows.dtype), ends)
    out = out * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1).to(out.dtype)
    return torch.zeros_like(hidden_states).index_add(0, token, out.to(hidden_states.dtype))


class _CausalAttention(torch.autograd.Function):
    """softmax(q k^T) v over (heads, length, dim), without the products above the diagonal."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore
        length = query.shape[1]
        triangle = torch.full((BLOCK, BLOCK), -1e9, dtype=query.dtype).triu(1)
        out, weights = torch.empty_like(value), []
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            scores = torch.bmm(query[:, start:end], key[:, :end].transpose(1, 2))
            scores[..., start:].add_(triangle[: end - start, : end - start])
            weights.append(torch.softmax(scores, -1))
            out[:, start:end] = torch.bmm(weights[-1], value[:, :end])
        ctx.save_for_backward(query, key, value, *weights)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore
        query, key, value, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for start, weight in zip(range(0, query.shape[1], BLOCK), weights, strict=True):
            end = start + weight.shape[1]
            some = grad[:, start:end]
            grad_value[:, :end].baddbmm_(weight.transpose(1, 2), some)
            grad_weight = torch.bmm(some, value[:, :end].transpose(1, 2))
            scores = torch._softmax_backward_data(grad_weight, weight, -1, weight.dtype)
            grad_query[:, start:end] = torch.bmm(scores, key[:, :end])
            grad_key[:, :end].baddbmm_(scores.transpose(1, 2), query[:, start:end])
        return grad_query, grad_key, grad_value


def blockwise_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float,
    **_rest: object,
) -> tuple[Tensor, None]:
    """Causal attention over (rows, heads, length, dim), in the form `transformers` calls.

    In bf16 on a CPU this takes half the time of torch's flash kernel, forward and backward.
    """
    rows, heads, length, _ = query.shape
    kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else query.dtype
    query, key, value = (
        part.to(kind).reshape(rows * heads, length, -1).contiguous()
        for part in (query * scaling, key, value)
    )
    out = _CausalAttention.apply(query, key, value)
    return out.view(rows, heads, length, -1).transpose(1, 2), None


ALL_EXPERTS_FUNCTIONS["sorted_mm"] = sorted_experts
AttentionInterface.register("blockwise", blockwise_attention)


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal by five Newton-Schulz steps.

    Of stacked matrices (experts) each is treated alone; the update's root mean square is
    0.2 times the learning rate, so that rates of AdamW serve.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].mul_(group["momentum"]).add_(weight.grad)
                update = orthogonal(weight.grad + group["momentum"] * momentum)
                size = max(weight.shape[-2:]) ** 0.5 * 0.2
                weight.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"] * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix, nearly: singular values come to about 1.

    The quintic iteration X <- aX + (bA + cA^2)X, A = XX^T, of K. Jordan et al., "Muon" (2024).
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-2, -1) if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-2, -1)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.transpose(-2, -1) if tall else x
