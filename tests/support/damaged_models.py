"""Damages tiny models at random, and says what becomes of them: loaded, or refused in a line.

python damaged_models.py BASES SEED COUNT     a line of JSON for each of COUNT damaged models
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from bifolio.checkpoint.load import load_models
from bifolio.checkpoint.source import resolve_source
from bifolio.cli.plan_model import find_model
from bifolio.errors import BifolioError
from bifolio.formats import PrecisionPlan
from bifolio.kernels.reference import ReferenceOps
from bifolio.lab.compress.source_model import SourceModel
from bifolio.text.tokenizer_files import load_text_side
from support.checkpoint_layouts import LAYOUTS, quantised
from support.damaged_json import change, doubled, nested
from support.gguf_files import write_gguf
from support.tiny import (
    LLAMA3_ROPE,
    YARN_ROPE,
    random_weights,
    tiny_config,
    write_model,
    write_weights,
)

MEMORY = 6 << 30
"""Address space of a process that loads damaged models; half of it is taken by libraries."""

MOST_CHARS = 2000
"""Of a refusal."""

_SHORT = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
_BASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", rope_parameters=LLAMA3_ROPE, **_SHORT),
    "qwen2": tiny_config("qwen2", use_sliding_window=True, sliding_window=8, **_SHORT),
    "qwen3_moe": tiny_config("qwen3_moe", **_SHORT),
    "deepseek_v3": tiny_config(
        "deepseek_v3", rope_parameters=YARN_ROPE, **_SHORT | {"num_hidden_layers": 2}
    ),
    "glm": tiny_config(
        "glm_moe_dsa", **_SHORT | {"num_hidden_layers": 2}, indexer_types=["full"] * 2
    ),
}
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
_WHOLE = (b"", _POINTER, b"<!DOCTYPE html><p>Log in", b"PK\x03\x04", b"\0" * 4096, b"\xff\xfe{\0")


def write_bases(folder: Path) -> None:
    """Sound models: a folder of each family, one of them in shards, and a GGUF file."""
    for name, config in _BASES.items():
        write_model(folder / name, config, shards=2 if name == "qwen2" else 1)
    for name, layout in {"packed": "int4 with zero points", "gptq": "GPTQ"}.items():
        quantization = LAYOUTS[layout][0] | {"ignore": ["re:.*lm_head", "model.embed_tokens"]}
        config = _BASES["llama"] | {"quantization_config": quantization}
        write_model(folder / name, config)
        write_weights(folder / name, quantised(random_weights(config), layout, "proj")[0])
    template = json.loads((folder / "llama" / "tokenizer_config.json").read_text())
    (folder / "llama" / "chat_template.jinja").write_text(template["chat_template"])
    (folder / "llama" / "special_tokens_map.json").write_text('{"pad_token": {"content": "a"}}')
    config = tiny_config("llama", num_hidden_layers=1)
    write_gguf(folder / "model.gguf", config, lambda _name: Type.Q8_0, tokenizer=True)


def damaged(base: Path, folder: Path, seed: int) -> tuple[Path, str]:
    """A copy of one of the bases in `folder`, damaged once to three times, and what was done."""
    rng = random.Random(seed)
    chosen = rng.choice(sorted(base.iterdir()))
    model = folder / chosen.name
    if chosen.is_dir():
        shutil.copytree(chosen, model)
    else:
        shutil.copyfile(chosen, model)
    done = []
    for _ in range(rng.randint(1, 3)):
        inside = [model] if chosen.is_file() else model.iterdir()
        paths = sorted(path for path in inside if _is_small(path))
        if not paths:
            break
        path = rng.choice(paths)
        change = rng.choice(_CHANGES[path.suffix])
        change(rng, path)
        done.append(f"{change.__name__.strip('_')} {path.name}")
    return model, f"{chosen.name}: {', '.join(done)}"


def load(model: Path) -> str:
    """Plan, load, compress and tokenize: `loaded`, or the refusal. Anything else is raised."""
    said = []
    steps: tuple[Callable[[], object], ...] = (
        lambda: find_model(str(model)),
        lambda: load_models(
            resolve_source(str(model)),
            PrecisionPlan.parse("auto/bf16"),
            ReferenceOps(),
            positions=64,
        ),
        lambda: _texts(model),
        lambda: SourceModel(resolve_source(str(model))),
    )
    for step in steps if model.is_dir() else steps[:3]:
        try:
            step()
        except BifolioError as error:
            text = str(error)
            assert text.encode().decode() == text
            assert text and "\n" not in text and len(text) < MOST_CHARS, text
            said.append(text)
    return said[0] if said else "loaded"


def _texts(model: Path) -> object:
    source = resolve_source(str(model))
    return load_text_side(source.gguf.metadata if source.is_gguf else source.path)


# Ways to damage a file


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 2**30


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 8)):
        if data:
            data[_place(rng, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _truncate(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: _place(rng, len(data) + 1)])


def _splice(rng: random.Random, path: Path) -> None:
    """Some bytes from elsewhere in the file, or none, in place of some."""
    data = path.read_bytes()
    at, source = _place(rng, len(data) + 1), _place(rng, len(data) + 1)
    count = rng.choice((0, 1, 8, 100))
    path.write_bytes(data[:at] + data[source : source + count] + data[at + rng.choice((0, 1, 8)) :])


def _number(rng: random.Random, path: Path) -> None:
    """A number of 4 or 8 bytes that no size should be."""
    data = bytearray(path.read_bytes())
    size = rng.choice((4, 8))
    value = rng.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1))
    at = 0 if path.suffix == ".safetensors" and rng.random() < 0.3 else _place(rng, len(data) + 1)
    data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(data)


def _replace(rng: random.Random, path: Path) -> None:
    path.write_bytes(rng.choice(_WHOLE))


def _other_kind(rng: random.Random, path: Path) -> None:
    path.unlink()
    kind = rng.choice(("pipe", "device", "folder", "dangling", "loop", "sparse"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**36)
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name}.get(kind, "nowhere"))


def _structure(rng: random.Random, path: Path) -> None:
    """Change one place of a JSON document, of a header of safetensors too."""
    data = path.read_bytes()
    head = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
    try:
        document = json.loads(data[8 : 8 + head] if head else data)
    except (ValueError, RecursionError):
        return
    change(rng, document)
    text = json.dumps(document)
    if rng.random() < 0.05:
        text = nested(text)
    if rng.random() < 0.05:
        text = doubled(text)
    if head:
        path.write_bytes(
            len(text.encode()).to_bytes(8, "little") + text.encode() + data[8 + head :]
        )
    else:
        path.write_text(text)


def _place(rng: random.Random, size: int) -> int:
    """A place in a file, most often near its beginning, where headers are."""
    return rng.randrange(min(size, rng.choice((40, 4000, size)))) if size else 0


_BYTES = (_flip, _truncate, _splice, _replace, _other_kind)
_CHANGES: dict[str, tuple[Callable[[random.Random, Path], None], ...]] = {
    ".json": (*_BYTES, *(_structure,) * 10),
    ".safetensors": (*_BYTES, _number, _number, *(_structure,) * 4),
    ".gguf": (*_BYTES, *(_flip, _number, _splice) * 6),
    ".jinja": _BYTES,
}


def main() -> None:
    """Print what becomes of COUNT models, each line as soon as it is known."""
    bases, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(seed, seed + count):
        with tempfile.TemporaryDirectory() as folder:
            model, done = damaged(bases, Path(folder), number)
            print(json.dumps({"seed": number, "done": done}), flush=True)
            began, line = time.monotonic(), dict[str, Any]()
            try:
                line["said"] = load(model).replace(folder, "")
            except BaseException:  # what this looks for
                line["raised"] = traceback.format_exc()
        line["seconds"] = round(time.monotonic() - began, 2)
        line["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
