"""Where a model comes from: a folder, a GGUF file, a Hugging Face id or a built-in name.

No torch here, so that a process that only handles text can use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bifolio.checkpoint.builtin import BUILTIN, fetch_builtin
from bifolio.checkpoint.default_sampling import DefaultSampling, default_sampling_of
from bifolio.checkpoint.download_progress import Report, hub_bar, silent
from bifolio.checkpoint.gguf import GGUFFile
from bifolio.checkpoint.gguf_spec import gguf_spec
from bifolio.errors import CheckpointError, ConfigError
from bifolio.input_files import CONFIG_BYTES, LARGE_BYTES, read_object
from bifolio.spec import ModelSpec
from bifolio.spec.config_json import read_config
from bifolio.spec.fields import Fields

ORIGIN = "bifolio_origin"
"""Key of config.json with the identity of the checkpoint that this one was made from."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?(@[\w./-]+)?")
_HUB_FILES = [
    "*.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "model*.safetensors",
]


@dataclass(frozen=True)
class ModelSource:
    """A model on this disk. `path` is a folder in the Hugging Face layout, or a GGUF file."""

    name: str
    """As the user spelled it."""
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @cached_property
    def gguf(self) -> GGUFFile:
        """The opened GGUF file; its metadata holds tokenizer and chat template."""
        assert self.is_gguf
        return GGUFFile(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        return _read_object(self.path / "config.json", required=True)

    @property
    def origin(self) -> str:
        """Identity of the checkpoint that this one was compressed or calibrated from, or empty."""
        found = "" if self.is_gguf else self.config.get(ORIGIN, "")
        return found if isinstance(found, str) else ""

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return _read_object(self.path / "generation_config.json")

    @cached_property
    def default_sampling(self) -> DefaultSampling:
        """The sampling that the model's files recommend; CheckpointError names a wrong value."""
        if self.is_gguf:
            return default_sampling_of({}, self.gguf.metadata)
        return default_sampling_of(self.generation_config)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return _read_object(self.path / "tokenizer_config.json")

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Read each time: a hundred thousand tokens are not kept for the life of a server."""
        return _read_object(self.path / "tokenizer.json")

    @cached_property
    def spec(self) -> ModelSpec:
        """The shape of the model. `stop_ids` is the union of the end tokens in all its files.

        CheckpointError and UnsupportedError name file and key.
        """
        if self.is_gguf:
            spec = gguf_spec(self.gguf)
        else:
            spec = read_config(self.config, self.generation_config)
            spec = replace(spec, stop_ids=tuple(dict.fromkeys((*spec.stop_ids, *self._end_token))))
        for token in spec.stop_ids:
            if token >= spec.vocab:
                raise CheckpointError(
                    f"{self.path}: end token {token} is none of the model's {spec.vocab} tokens; "
                    "correct eos_token_id, or what else names it"
                )
        return spec

    @property
    def _end_token(self) -> tuple[int, ...]:
        """The id of the `eos_token` that tokenizer_config.json names by its text."""
        path = self.path / "tokenizer_config.json"
        settings = Fields(self.tokenizer_config, str(path))
        text = settings.token("eos_token")
        if not text:
            return ()
        for token, entry in settings.part("added_tokens_decoder").numbered():
            if entry.text("content", "") == text:
                return (token,)
        path = self.path / "tokenizer.json"
        added = Fields(self.tokenizer, str(path)).parts("added_tokens")
        return tuple(
            entry.integer("id", low=0) for entry in added if entry.text("content", "") == text
        )


def resolve_source(name: str, report: Report = silent) -> ModelSource:
    """Find a model, and fetch it into a cache if need be.

    `name` is a folder, a .gguf file, `owner/model` or `owner/model/file.gguf` on the Hugging Face
    hub (`@revision` may follow), or a built-in name. ConfigError says what to do instead.
    HF_HUB_OFFLINE=1 keeps to what is cached.
    """
    path = Path(name).expanduser()
    if name in BUILTIN:
        return ModelSource(name, fetch_builtin(name, report))
    if path.is_dir():
        return ModelSource(name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{name} is a file, but no .gguf; give a folder or a .gguf file")
        return ModelSource(name, path)
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "/")):
        return ModelSource(name, _fetch_from_hub(name, report))
    raise ConfigError(
        f"there is no model {name!r}; give a folder, a .gguf file, a Hugging Face id "
        f"(owner/model) or a built-in name ({', '.join(BUILTIN)})"
    )


def _read_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    found = read_object(path, LARGE_BYTES if path.name == "tokenizer.json" else CONFIG_BYTES)
    if found is None and required:
        raise CheckpointError(f"{path.parent} holds no {path.name}")
    return found or {}


def _fetch_from_hub(name: str, report: Report) -> Path:
    """Download (or find in the cache) a snapshot or one GGUF file of a Hugging Face repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repository, _, revision = name.partition("@")
    owner, model, *inside = repository.split("/", 2)
    report(f"looking for {name}", 0, 0)
    try:
        folder = snapshot_download(
            f"{owner}/{model}",
            revision=revision or None,
            allow_patterns=inside or _HUB_FILES,
            tqdm_class=hub_bar(report, f"downloading {name}"),
        )
    except GatedRepoError as error:
        hint = "accept its terms on the hub and set HF_TOKEN"
        raise ConfigError(f"{name} is gated; {hint}") from error
    except RepositoryNotFoundError as error:
        hint = "check the spelling, or set HF_TOKEN if it is private"
        raise ConfigError(f"the Hugging Face hub has no {name}; {hint}") from error
    except LocalEntryNotFoundError as error:
        hint = "the hub cannot be reached (or HF_HUB_OFFLINE is set) and the cache lacks it"
        raise ConfigError(f"cannot get {name}: {hint}; give a folder or a .gguf file") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"cannot get {name} from the Hugging Face hub: {first}") from error
    path = Path(folder, *inside)
    if not path.exists():
        raise ConfigError(f"{owner}/{model} on the Hugging Face hub has no {inside[0]}")
    return path
