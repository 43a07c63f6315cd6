"""Models by name: from the Hugging Face hub, or a local directory."""

import os
from pathlib import Path

from jax_ppo.models.tensor_files import TensorFiles
from jax_ppo.types import InputError

WANTED = ["*.json", "*.safetensors", "tokenizer*", "merges.txt", "*.jinja"]
# A machine without a network should hear so in seconds, not after a minute of retries.
TIMEOUT = 5


def model_directory(path: str, *, flag: str) -> Path:
    """The local directory of a model; downloads it where `path` is a hub id that is not in the cache.

    What looks like a path (it exists, or starts with "/", "." or "~") is never looked up on the hub.

    Args:
      path: directory or hub id.
      flag: where it was given, for the message: "config.model.path", or another flag without its dashes.

    Raises:
      InputError: if there is no such directory, or the hub cannot give the model.
    """
    local = Path(os.path.expanduser(path))
    if path and local.is_dir():
        return local
    if path and local.exists():
        raise InputError(f"{flag}={path!r}: is a file; give the directory it lies in")
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise _neither(path, flag)
    return _download(path, flag)


def _neither(path: str, flag: str) -> InputError:
    return InputError(f"{flag}={path!r}: no such directory, and not a hub id such as Qwen/Qwen2.5-0.5B-Instruct")


def _download(name: str, flag: str) -> Path:
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(TIMEOUT))  # read when huggingface_hub is imported
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    hint = f"give a local directory instead: --{flag}=DIR"
    cached = "not in the local cache"
    try:
        directory = Path(snapshot_download(name, allow_patterns=WANTED, local_files_only=True))
        if _complete(directory):
            return directory
        cached = "only a part is in the local cache"
    except HFValidationError:
        raise _neither(name, flag) from None
    except LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(name, timeout=TIMEOUT)
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except RepositoryNotFoundError:
        raise InputError(f"{flag}={name!r}: the hub has no such model, or it is private; {hint}") from None
    except HfHubHTTPError as error:
        raise InputError(f"{flag}={name!r}: the hub refused ({_first_line(error)}); {hint}") from None
    except Exception as error:  # every transport has its own exceptions, and each means the same to the reader
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise InputError(f"{flag}={name!r}: {cached} and the hub cannot be reached ({reason}); {hint}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _complete(directory: Path) -> bool:
    """Whether a snapshot has all that a model needs; one that only a tokenizer was loaded from has not."""
    try:
        with TensorFiles(directory):
            return True
    except InputError:
        return False
