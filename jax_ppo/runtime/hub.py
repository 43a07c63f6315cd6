"""Models by name: from the Hugging Face hub, or a local directory."""

import os
from pathlib import Path

from jax_ppo.types import InputError

WANTED = ["*.json", "*.safetensors", "tokenizer*", "merges.txt", "*.jinja"]


def model_directory(path: str, *, key: str) -> Path:
    """The local directory of a model; downloads it where `path` is a hub id that is not in the cache.

    What looks like a path (it exists, or starts with "/", "." or "~") is never looked up on the hub.

    Args:
      path: directory or hub id.
      key:  the configuration key it came from, for the message.

    Raises:
      InputError: if there is no such directory, or the hub cannot give the model.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise InputError(f"config.{key}={path!r}: no such directory, and not a hub id such as Qwen/Qwen2.5-0.5B-Instruct")
    return _download(path, key)


def _download(name: str, key: str) -> Path:
    # Read at import: a machine without a network should hear so in seconds, not after a minute of retries.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    hint = f"give a local directory instead: --config.{key}=DIR"
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(name, timeout=5)
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except RepositoryNotFoundError:
        raise InputError(f"config.{key}={name!r}: the hub has no such model, or it is private; {hint}") from None
    except HfHubHTTPError as error:
        raise InputError(f"config.{key}={name!r}: the hub refused ({str(error).splitlines()[0]}); {hint}") from None
    except Exception as error:  # every transport has its own exceptions, and each means the same to the reader
        raise InputError(
            f"config.{key}={name!r}: not in the local cache and the hub cannot be reached ({type(error).__name__}); {hint}"
        ) from None
