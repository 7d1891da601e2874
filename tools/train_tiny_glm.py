"""Give the small trained model the sparse attention of GLM-5, and save it as `glm_moe_dsa`.

    python tools/train_tiny_glm.py tests/checkpoint/tiny --out runs/tiny-glm --minutes 30

The choice of the top k positions has no gradient, so the work goes in three stages, as for the
models that were published: dense training, which `train_tiny.py` has done (the weights have the
same shapes and names); then the indexer learns by KL where the dense attention looks; then
attention sees the chosen positions only, while the indexer goes on learning where, among these, it
looks. The last layer shares the choice of the one before it. With `--experts` only the experts with
the most tokens stay, and the others' work is learned again on the way.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaIndexer,
    apply_rotary_pos_emb_interleave,
)

import tiny_model  # noqa: F401 - registers the experts' loop
from train_tiny import answer_logits, batch, scores, write_checkpoint

TYPES = ["full", "full", "shared"]
SHARED = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads n_routed_experts n_shared_experts num_experts_per_tok "
    "first_k_dense_replace n_group topk_group norm_topk_prob routed_scaling_factor q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim max_position_embeddings "
    "rope_parameters tie_word_embeddings rms_norm_eps pad_token_id bos_token_id eos_token_id"
)


def widen(dense: DeepseekV3ForCausalLM, top_k: int, seed: int) -> GlmMoeDsaForCausalLM:
    """The dense model's weights in the GLM shape, beside new indexers."""
    config = GlmMoeDsaConfig(
        **{name: getattr(dense.config, name) for name in SHARED.split()},
        indexer_types=TYPES,
        index_topk=top_k,
        index_n_heads=8,
        index_head_dim=32,
    )
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected
    assert all(".indexer." in name for name in missing)
    model.config._experts_implementation = "sorted_mm"
    return model


@torch.no_grad()
def keep_experts(dense: DeepseekV3ForCausalLM, count: int, seed: int) -> DeepseekV3ForCausalLM:
    """The model with the `count` experts of each layer that get the most tokens."""
    loads: dict[nn.Module, Tensor] = {}

    def add(router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        loads[router] = loads.get(router, 0) + output[2].flatten().bincount(minlength=total)

    total = dense.config.n_routed_experts
    moes = [layer.mlp for layer in dense.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [moe.gate.register_forward_hook(add) for moe in moes]
    ids, targets = batch(random.Random(f"experts {seed}"), 16, 512)
    answer_logits(dense, ids, targets)
    for hook in hooks:
        hook.remove()
    config = copy.deepcopy(dense.config)
    config.n_routed_experts = config.num_local_experts = count
    state = dense.state_dict()
    for name, value in state.items():
        layer, _, part = name.partition(".mlp.")
        if part.startswith(("gate.", "experts.")):
            chosen = loads[dense.get_submodule(f"{layer}.mlp.gate")].topk(count).indices.sort()[0]
            state[name] = value[chosen]
    smaller = DeepseekV3ForCausalLM(config).float()
    smaller.load_state_dict(state)
    return smaller


class Choosing:
    """Stands in for indexers and attention of a model, and keeps what the indexer learns from.

    `scores` holds (rows, queries, keys) index scores of each layer that has an indexer, -inf where
    a key may not be seen; `looked` where attention looked, the mean over heads, of every layer.
    While `sparse` is false, attention sees every position.
    """

    def __init__(self, model: GlmMoeDsaForCausalLM) -> None:
        self.sparse = False
        self.scores: dict[int, Tensor] = {}
        self.looked: dict[int, Tensor] = {}
        for layer in model.model.layers:
            indexer = layer.self_attn.indexer
            if indexer is not None:
                indexer.forward = partial(self._index, indexer)
        AttentionInterface.register("choosing", self._attend)
        AttentionMaskInterface.register("choosing", eager_mask)
        model.set_attn_implementation("choosing")

    def _index(
        self,
        indexer: GlmMoeDsaIndexer,
        hidden: Tensor,
        query_latent: Tensor,
        position: tuple[Tensor, Tensor],
        mask: Tensor,
        *_rest: object,
        **_more: object,
    ) -> Tensor:
        """The indexer's own formula, with a gradient for its weights and for nothing else."""
        with torch.enable_grad():
            hidden, query_latent = hidden.detach().float(), query_latent.detach().float()
            rows, length, _ = hidden.shape
            rotated = indexer.qk_rope_head_dim
            query = indexer.wq_b(query_latent).view(rows, length, indexer.n_heads, -1)
            key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
            query_rotated, key_rotated = apply_rotary_pos_emb_interleave(
                query[..., :rotated], key[..., :rotated], *position, unsqueeze_dim=2
            )
            query = torch.cat([query_rotated, query[..., rotated:]], -1)
            key = torch.cat([key_rotated, key[..., rotated:]], -1).squeeze(2)
            by_head = torch.einsum("bqhd,bkd->bqhk", query, key) * indexer.softmax_scale
            weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
            found = torch.einsum("bqh,bqhk->bqk", weights, by_head.relu())
            found = found.masked_fill(mask < 0, float("-inf"))
        chosen = found.detach().topk(min(indexer.index_topk, length)).indices
        if self.sparse:
            found = found.masked_fill(_others(found, chosen), float("-inf"))
        self.scores[indexer.layer_idx] = found
        return chosen.to(torch.int32)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scaling: float,
        indices: Tensor,
        **_rest: object,
    ) -> tuple[Tensor, None]:
        """Attention over the chosen positions or all, in the form `transformers` calls."""
        logits = query @ key.transpose(-2, -1) * scaling + mask
        if self.sparse:
            logits = logits.masked_fill(_others(logits[:, 0], indices).unsqueeze(1), -1e9)
        weights = logits.softmax(-1)
        self.looked[module.layer_idx] = weights.detach().mean(1)
        return (weights @ value).transpose(1, 2), None

    def loss(self) -> Tensor:
        """KL(attention || softmax of index scores), the mean over queries and indexers."""
        parts = []
        for layer, found in self.scores.items():
            target = self._target(layer)
            log_q = found.log_softmax(-1).masked_fill(found == float("-inf"), 0.0)
            parts.append((torch.xlogy(target, target) - target * log_q).sum(-1).mean())
        return torch.stack(parts).mean()

    def recall(self, top_k: int) -> float:
        """The share of attention that the `top_k` best scores hold, of the worst indexer."""
        found = []
        for layer, score in self.scores.items():
            chosen = score.detach().topk(min(top_k, score.shape[-1])).indices
            found.append(float(self._target(layer).gather(-1, chosen).sum(-1).mean()))
        return min(found)

    def _target(self, layer: int) -> Tensor:
        """Where this layer looked, and those that share its choice."""
        users = [layer]
        while users[-1] + 1 < len(TYPES) and TYPES[users[-1] + 1] == "shared":
            users.append(users[-1] + 1)
        return torch.stack([self.looked[user] for user in users]).mean(0)


def _others(scores: Tensor, chosen: Tensor) -> Tensor:
    """True at the positions (rows, queries, keys) that were not chosen."""
    return torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen.long(), False)


def teach(
    model: GlmMoeDsaForCausalLM, choosing: Choosing, arguments: argparse.Namespace, log: Path
) -> None:
    """The first half of the time with dense attention, the second on the chosen positions."""
    indexers = [w for name, w in model.named_parameters() if ".indexer." in name]
    others = [w for name, w in model.named_parameters() if ".indexer." not in name]
    optimizer = torch.optim.AdamW(
        [{"params": indexers, "top": 3e-3}, {"params": others, "top": 5e-4}],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    started, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        rng = random.Random(f"{arguments.seed}/{step}")
        choosing.sparse = done >= 0.5
        ids, targets = batch(rng, arguments.rows, rng.choice(arguments.row_lengths))
        logits, wanted = answer_logits(model, ids, targets)
        loss = nn.functional.cross_entropy(logits, wanted)
        distance = choosing.loss()
        (loss + distance).backward()
        fall = min(1.0, 2 * (1 - done))
        for group in optimizer.param_groups:
            group["lr"] = group["top"] * fall * min(1.0, (step + 1) / 20)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        entry = {
            "step": step,
            "sparse": choosing.sparse,
            "loss": round(loss.item(), 4),
            "kl": round(distance.item(), 4),
        }
        if not choosing.sparse:
            entry["recall"] = round(choosing.recall(model.config.index_topk), 4)
        with log.open("a") as file:
            print(json.dumps(entry), file=file)
        step += 1
        minutes = (time.monotonic() - started) / 60
        done = step / arguments.steps if arguments.steps else minutes / arguments.minutes


def main(options: Sequence[str] | None = None) -> None:
    """Read the options (of the command line, if none are given), train, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dense", type=Path, help="checkpoint of train_tiny.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of log and checkpoint")
    parser.add_argument("--top-k", type=int, default=64, help="positions that attention may see")
    parser.add_argument("--experts", type=int, help="keep so many in each layer; all by default")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--steps", type=int, help="length of the schedule in steps instead")
    parser.add_argument("--rows", type=int, default=2, help="per step")
    parser.add_argument("--row-lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--questions", type=int, default=64, help="per task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(options)
    arguments.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dense = DeepseekV3ForCausalLM.from_pretrained(arguments.dense, dtype=torch.float32)
    if arguments.experts:
        dense = keep_experts(dense, arguments.experts, arguments.seed)
    model = widen(dense, arguments.top_k, arguments.seed)
    choosing = Choosing(model)
    found = {"dense": scores(model, arguments.questions, arguments.lengths)}
    teach(model, choosing, arguments, arguments.out / "log.jsonl")
    choosing.sparse = True
    found["sparse"] = scores(model, arguments.questions, arguments.lengths)
    write_checkpoint(model, arguments.out / "checkpoint")
    found = {**found, "command": ["python", *sys.argv], "seed": arguments.seed}
    (arguments.out / "checkpoint" / "scores.json").write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
