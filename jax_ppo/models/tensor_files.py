"""Tensors of a Hugging Face directory by name: read lazily from safetensors, written in shards.

Everything refused is an `InputError` of one line that names the file. Opening reads headers only, so a damaged directory costs
seconds.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_ppo.types import InputError

NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


class Tensor(NamedTuple):
    """A tensor to write: its number of elements, and a function that fetches it, so that only one file's worth is on the host."""

    size: int
    fetch: Callable[[], Any]


def check_directory(directory: Path) -> Path:
    """Refuses what is not a model directory; one without any weights passes, since its description alone is of use.

    Raises:
      InputError: saying what is there instead.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: {'is a file, give its directory' if directory.exists() else 'no such directory'}")
    if (directory / "adapter_config.json").exists():
        raise InputError(f"{directory}: this is an adapter; merge it into its base model first")
    if any(directory.glob("pytorch_model*.bin")) and not any(directory.glob("*.safetensors*")):
        raise InputError(f"{directory}: only pytorch_model.bin; .bin is not supported, convert it to safetensors")
    if not (directory / "config.json").exists():
        raise InputError(f"{directory}: config.json is missing")
    return directory


class TensorFiles:
    """The tensors of a directory, opened lazily. Where both exist, `model.safetensors` counts and the shards do not.

    where:   tensor name -> file.
    listing: the file that says which tensors there are.
    """

    def __init__(self, directory: str | Path):
        """Opens the files and reads their headers.

        Args:
          directory: with `model.safetensors`, or with shards and `model.safetensors.index.json`.

        Raises:
          InputError: if there are no weights, or a file is missing, damaged or at odds with the index.
        """
        self.directory = check_directory(Path(directory))
        single, index = self.directory / SINGLE, self.directory / INDEX
        self._open: dict[Path, Any] = {}
        self.listing = single if single.exists() else index
        if single.exists():
            self.where = dict.fromkeys(self.file(single).keys(), single)
        elif index.exists():
            self.where = self._indexed(index)
        else:
            raise InputError(f"{self.directory}: no weights (looked for {SINGLE} and {INDEX})")

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files, which are opened again when something is read: what was read no longer counts as memory in use."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def file(self, path: Path) -> Any:
        """The open handle of a safetensors file."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="numpy").__enter__()
            except (SafetensorError, OSError) as error:
                start = path.read_bytes()[:20] if path.is_file() and path.stat().st_size < 1000 else b""
                hint = "a git-lfs pointer, not the file itself" if start.startswith(b"version https") else str(error)
                raise InputError(f"{path}: cannot be read, the download may be incomplete ({hint})") from None
        return self._open[path]

    def slice(self, name: str) -> Any:
        """A lazily read tensor: index it to read that part, and no more, from disk."""
        return self.file(self.where[name]).get_slice(name)

    def _indexed(self, index: Path) -> dict[str, Path]:
        """Tensor name -> file from the index, once index and files agree."""
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            where = {name: index.parent / file for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: not a usable index ({error!r})") from None
        for path in sorted(set(where.values())):
            if not path.exists():
                raise InputError(f"{path}: named by {index.name} but missing; the download may be incomplete")
            for name in self.file(path).keys():  # noqa: SIM118
                if where.get(name) != path:
                    raise InputError(
                        f"{path}: holds {name}, which {index.name} places in {where[name].name if name in where else 'no file'}"
                    )
        for name, path in where.items():
            if name not in self.file(path).keys():  # noqa: SIM118
                raise InputError(f"{path}: does not hold {name}, which {index.name} places there")
        return where


def write(
    tensors: Mapping[str, Tensor], dtype: np.dtype, directory: Path, progress: Callable[[int], Any] = lambda tensors: None
) -> None:
    """Writes one `model.safetensors`, or shards of at most SHARD_BYTES and their index.

    Args:
      tensors:   by name.
      dtype:     of every tensor in the file.
      directory: where the files go.
      progress:  called with 1 for every tensor that is fetched.

    Raises:
      OSError: if a file cannot be written.
    """
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        size = tensor.size * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, names in zip(files, shards, strict=True):
        arrays = {}
        for name in names:
            # C order, because the writer dumps memory as it lies and a transposed view would come back as another matrix.
            arrays[name] = np.ascontiguousarray(np.asarray(tensors[name].fetch()).astype(dtype))
            progress(1)
        target = directory / file
        target.touch()
        mode = target.stat().st_mode  # what the user's mask gives; the writer would leave a file that nobody else can read
        try:
            save_file(arrays, target, metadata={"format": "pt"})
            target.chmod(mode)
        except SafetensorError as error:
            raise OSError(f"{target}: {error}") from None
    if count > 1:
        index = {
            "metadata": {"total_size": sum(t.size for t in tensors.values()) * dtype.itemsize},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
