"""Train the small model of the DeepSeek-V3 shape on the CPU, and save it as a checkpoint.

    python tools/train_tiny.py --minutes 100 --out runs/tiny

The schedule follows the clock: `--minutes` is the whole of it, the learning rate falls to zero at
its end, and `--resume` goes on from the last state in `--out` with the time that is left. With
`--steps` the schedule follows the steps instead, so that a run can be repeated exactly. Held-out
exact match by task and length goes to `log.jsonl` in `--out`. The model's text is bytes; see
`tiny_tasks.py` for the tasks and `tiny_model.py` for the shape.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, multiprocessing, nn
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tiny_model import Muon, build, tokenizer
from tiny_tasks import IGNORE, PAD, encode, held_question, training_row

CURRICULUM = (  # up to this part of the run: the share of long tasks, and the rows' lengths
    (0.06, 0.72, (128,)),
    (0.18, 0.72, (128, 256, 256)),
    (0.36, 0.72, (256, 512, 512, 512)),
    (0.60, 0.55, (256, 512, 1024, 1024, 1024, 1024)),
    (1.00, 0.50, (256, 512, 1024, 1024, 1024, 2048, 4096)),
)
BIAS_STEP = 1e-2  # by which an expert's correction bias moves per step, as the rate is highest
ROUTER_RATE = 0.25  # of the learning rate: routers that move fast leave experts without tokens


# --- rows of tokens ------------------------------------------------------------------------------


def batch(rng: random.Random, rows: int, length: int, long: float = 0.7) -> tuple[Tensor, Tensor]:
    """(rows, length) ids and targets, a target at its own place; `long` as in `training_row`."""
    ids = torch.full((rows, length), PAD)
    targets = torch.full((rows, length), IGNORE)
    for row in range(rows):
        at = 0
        for conversation in training_row(rng, length, long):
            some_ids, some_targets = encode(conversation)
            some_ids, some_targets = some_ids[: length - at], some_targets[: length - at]
            ids[row, at : at + len(some_ids)] = torch.tensor(some_ids)
            targets[row, at : at + len(some_ids)] = torch.tensor(some_targets)
            at += len(some_ids)
    return ids, targets


def answer_logits(
    model: DeepseekV3ForCausalLM, ids: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits (answer tokens, vocabulary) of the places before targets, and these targets."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = targets[:, 1:] != IGNORE
    return model.lm_head(hidden[:, :-1][wanted]).float(), targets[:, 1:][wanted]


# --- held-out scores -----------------------------------------------------------------------------


@torch.no_grad()
def exact_match(
    model: DeepseekV3ForCausalLM, task: str, length: int, questions: int, seed: int
) -> tuple[float, float]:
    """The share of held-out answers that greedy decoding would give in full, and of tokens.

    Every token of the answer being the most likely one after its correct beginning is the same
    as greedy decoding giving the answer, so one forward pass scores it.
    """
    rng = random.Random(f"{seed}/{task}/{length}")
    right = tokens = hits = 0
    width = max(1, 8192 // max(length, 512))
    for start in range(0, questions, width):
        some = [
            encode(held_question(task, rng, length)) for _ in range(min(width, questions - start))
        ]
        longest = max(len(ids) for ids, _ in some)
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row, _ in some])
        targets = torch.tensor([row + [IGNORE] * (longest - len(row)) for _, row in some])
        logits, wanted = answer_logits(model, ids, targets)
        hit = (logits.argmax(-1) == wanted).split((targets != IGNORE).sum(-1).tolist())
        right += sum(bool(row.all()) for row in hit)
        hits += sum(int(row.sum()) for row in hit)
        tokens += wanted.numel()
    return right / questions, hits / tokens


def scores(
    model: DeepseekV3ForCausalLM, questions: int, lengths: Sequence[int]
) -> dict[str, float]:
    """Exact match by task and, for copying and retrieval, by length."""
    model.eval()
    wanted = [(task, length) for length in reversed(lengths) for task in ("copy", "kv")]
    wanted += [("sums", 0), ("words", 0), ("tools", 0)]
    mine = {}
    for task, length in wanted[dist.get_rank() :: dist.get_world_size()]:
        name = f"{task}@{length}" if length else task
        mine[name], mine[f"{name}/token"] = exact_match(model, task, length, questions, seed=1)
    model.train()
    parts: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: round(part[name], 4) for part in parts for name in part}


# --- training ------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a run has done so far; it is part of the saved state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Model, optimizers, balance of experts and schedule of one run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = build(arguments.seed)
        matrices, routers, rest = [], [], []
        for name, weight in self.model.named_parameters():
            plain = "embed" in name or "lm_head" in name or weight.ndim != 2
            router = name.endswith("mlp.gate.weight")
            (routers if router else rest if plain else matrices).append(weight)
        self.optimizers = (
            Muon(matrices, lr=arguments.rate, decay=0.05),
            torch.optim.AdamW(
                [{"params": rest}, {"params": routers, "share": ROUTER_RATE}],
                betas=(0.9, 0.98),
                weight_decay=0.0,
                fused=True,
            ),
        )
        self.progress = Progress()
        self.loads: dict[DeepseekV3TopkRouter, Tensor] = {}
        for module in self.model.modules():
            if isinstance(module, DeepseekV3TopkRouter):
                module.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if router.training:
            assert isinstance(router, DeepseekV3TopkRouter)
            self.loads[router] = torch.bincount(output[2].reshape(-1), minlength=router.num_experts)

    def fraction(self) -> float:
        """How much of the schedule is done, 0 to 1."""
        if self.arguments.steps:
            return self.progress.step / self.arguments.steps
        return self.progress.seconds / (60 * self.arguments.minutes)

    def lesson(self, rng: random.Random) -> tuple[float, int]:
        """The share of long tasks, and the length of a step's rows."""
        done = self.fraction()
        long, lengths = next(rest for border, *rest in CURRICULUM if done < border)
        return long, rng.choice(lengths)

    def step(self) -> float:
        """One step; returns the loss."""
        started = time.monotonic()
        rng = random.Random(f"{self.arguments.seed}/{self.progress.step}")
        long, length = self.lesson(rng)
        rng = random.Random(f"{self.arguments.seed}/{self.progress.step}/{dist.get_rank()}")
        ids, targets = batch(rng, max(1, self.arguments.batch // length), length, long)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.arguments.bf16):
            logits, wanted = answer_logits(self.model, ids, targets)
        loss = nn.functional.cross_entropy(logits, wanted)
        loss.backward()
        self._average()
        rate = self._rate()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.arguments.rate * group.get("share", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for router, load in self.loads.items():
            router.e_score_correction_bias += BIAS_STEP * rate * (load.float().mean() - load).sign()
        self.progress.step += 1
        self.progress.tokens += ids.numel() * dist.get_world_size()
        self.count_time(started)
        return loss.item()

    def _average(self) -> None:
        """Make gradients the mean, loads the sum, over the processes."""
        for load in self.loads.values():
            dist.all_reduce(load)
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat.div_(dist.get_world_size()))
        for gradient, mean in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True
        ):
            gradient.copy_(mean)

    def count_time(self, started: float) -> None:
        """Add the time since; all processes take the first one's clock, on which all decide."""
        spent = torch.tensor([time.monotonic() - started], dtype=torch.float64)
        dist.broadcast(spent, 0)
        self.progress.seconds += spent.item()

    def _rate(self) -> float:
        """Warm-up over 100 steps, then level, then a straight fall over the last 45 %."""
        warm = min(1.0, (self.progress.step + 1) / 100)
        return warm * min(1.0, max(0.0, (1 - self.fraction()) / 0.45))

    def imbalance(self) -> float:
        """The fullest expert's load over the mean, of the worst layer, in the last step."""
        return max(float(load.max() / load.float().mean()) for load in self.loads.values())

    def save(self, path: Path) -> None:
        """Write the whole state, at once or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a saved state."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def write_checkpoint(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """The checkpoint in bf16 (the correction biases stay fp32), with its tokenizer."""
    biases = {name: value.clone() for name, value in model.named_buffers() if name.endswith("bias")}
    model.to(torch.bfloat16)
    for name, value in biases.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, value)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def write_scores(final: dict[str, float], trainer: Trainer, path: Path) -> None:
    """Held-out scores of the checkpoint, and what it takes to make it again."""
    arguments = trainer.arguments
    found = {
        "exact_match": {k: v for k, v in final.items() if not k.endswith("/token")},
        "right_tokens": {k[:-6]: v for k, v in final.items() if k.endswith("/token")},
        "questions": arguments.final_questions,
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        **vars(trainer.progress),
        "command": ["python", *sys.argv],
        "seed": arguments.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def train(trainer: Trainer, out: Path) -> None:
    """Steps until the schedule ends; scores and states on the way."""
    arguments, progress = trainer.arguments, trainer.progress
    first = dist.get_rank() == 0
    scored = saved = progress.seconds
    losses: list[float] = []
    while trainer.fraction() < 1:
        losses.append(trainer.step())
        assert math.isfinite(losses[-1]), "the loss is no longer a number"
        if progress.seconds - scored > 60 * arguments.score_minutes:
            started = time.monotonic()
            entry = {
                **vars(progress),
                "loss": round(sum(losses) / len(losses), 4),
                "imbalance": round(trainer.imbalance(), 2),
                **scores(trainer.model, arguments.questions, arguments.lengths),
            }
            trainer.count_time(started)
            losses, scored = [], progress.seconds
            if first:
                with (out / "log.jsonl").open("a") as log:
                    print(json.dumps(entry), file=log)
        if first and progress.step % 20 == 0:
            print(
                f"step {progress.step} loss {sum(losses[-20:]) / len(losses[-20:] or [1]):.3f} "
                f"{progress.tokens / progress.seconds:.0f} tokens/s "
                f"{progress.seconds / 60:.1f} min, fullest expert {trainer.imbalance():.1f}",
                flush=True,
            )
        if progress.seconds - saved > 60 * arguments.save_minutes:
            saved = progress.seconds
            if first:
                trainer.save(out / "state.pt")


def work(rank: int, arguments: argparse.Namespace) -> None:
    """One process of the run, with one thread: on a busy machine two of these beat two threads."""
    torch.set_num_threads(1)
    rendezvous = f"file://{arguments.out.resolve()}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=arguments.processes
    )
    trainer = Trainer(arguments)
    if arguments.resume:
        trainer.load(arguments.out / "state.pt")
    train(trainer, arguments.out)
    if rank == 0:
        trainer.save(arguments.out / "state.pt")
        write_checkpoint(trainer.model, arguments.out / "checkpoint")
    final = scores(trainer.model.to(torch.bfloat16), arguments.final_questions, arguments.lengths)
    if rank == 0:
        write_scores(final, trainer, arguments.out / "checkpoint" / "scores.json")
    dist.destroy_process_group()


def main(options: Sequence[str] | None = None) -> None:
    """Read the options (of the command line, if none are given), train, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of log, state, checkpoint")
    parser.add_argument("--minutes", type=float, default=100, help="length of the schedule")
    parser.add_argument("--steps", type=int, help="length of the schedule in steps instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--batch", type=int, default=2048, help="tokens per step and process")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16")
    parser.add_argument("--processes", type=int, default=2, help="each with one thread")
    parser.add_argument("--questions", type=int, default=32, help="per task and length, on the way")
    parser.add_argument("--final-questions", type=int, default=200, help="the same, at the end")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="to be scored")
    parser.add_argument("--score-minutes", type=float, default=4)
    parser.add_argument("--save-minutes", type=float, default=5)
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    arguments = parser.parse_args(options)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "rendezvous").unlink(missing_ok=True)
    if arguments.processes == 1:
        work(0, arguments)
    else:
        multiprocessing.spawn(work, (arguments,), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
