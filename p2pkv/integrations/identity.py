"""What makes the KV of two models differ though they have one name, as digests that go into keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2pkv.errors import ConfigError

_NOT_THE_MODELS = frozenset({"_name_or_path", "transformers_version"})
"""Where a configuration was read and by what: equal models may differ in it."""


def config_digest(model_config: Any) -> str:
    """Return a digest of what a model is made of, overrides included; ``model_config`` is one of transformers'."""

    def relevant(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): relevant(v) for k, v in value.items() if k not in _NOT_THE_MODELS}
        return [relevant(v) for v in value] if isinstance(value, (list, tuple)) else value

    # what JSON does not know counts by its kind: its repr may have an address in it
    text = json.dumps(
        relevant(model_config.to_dict()), sort_keys=True, default=lambda value: type(value).__name__
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def file_digest(setting: str, path: str) -> str:
    """Return a digest of a file's content. Raises :class:`~p2pkv.errors.ConfigError` that names ``setting``."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{setting} {path} can't be read ({error.strerror}), and pages that were computed with it must not be "
            "taken for others"
        ) from error
    return hashlib.blake2b(content, digest_size=8).hexdigest()
