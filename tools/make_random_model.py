"""Write random weights of a known shape, to measure speed: `make_random_model.py PRESET FOLDER`.

The shape comes from the planner's presets (`qwen2.5-0.5b`, `smollm2-135m`, …). Weights are bf16
from a fixed seed, of the size that keeps activations near one; the text it writes means nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bifolio.lab.plan.presets import PRESETS

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.tiny import random_weights, write_tokenizer, write_weights


def main() -> None:
    import torch

    if len(sys.argv) != 3 or sys.argv[1] not in PRESETS:
        sys.exit(f"usage: make_random_model.py PRESET FOLDER, PRESET one of {', '.join(PRESETS)}")
    preset, folder = PRESETS[sys.argv[1]], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(preset.config)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(folder, random_weights(config, dtype=torch.bfloat16))
    write_tokenizer(folder, config["vocab_size"])
    print(f"{folder}: random weights of {sys.argv[1]}")


if __name__ == "__main__":
    main()
