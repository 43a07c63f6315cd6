"""Copies of the golden models that a test may change."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

GOLDENS = Path(__file__).parents[1] / "goldens"
GONE = object()


class ModelDirectory:
    """A Hugging Face directory in a test's own folder, edited by the names and shapes that transformers wrote into it."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.path / "model.safetensors")

    def write(self, tensors: Mapping[str, np.ndarray], file: str = "model.safetensors") -> Path:
        """Writes one file of tensors, and makes sure that numpy's strides cannot turn them into others."""
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, self.path / file, metadata={"format": "pt"})
        return self.path / file

    def change(self, **tensors: Any) -> None:
        """Replaces or adds tensors, by name with __ for the dots."""
        self.write(self.tensors | {name.replace("__", "."): x for name, x in tensors.items()})

    def drop(self, name: str) -> None:
        tensors = self.tensors
        del tensors[name]
        self.write(tensors)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def configure(self, **keys: Any) -> None:
        """Replaces, adds or, where the value is `gone`, removes keys of config.json."""
        config = {key: value for key, value in (self.config | keys).items() if value is not GONE}
        (self.path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def gone() -> object:
    """What stands for a key that is to be removed."""
    return GONE


@pytest.fixture
def golden() -> Callable[[str], Path]:
    """The folder of a golden model, not to be changed."""
    return lambda name: GOLDENS / name


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., ModelDirectory]:
    """Makes a copy of a golden model."""

    def copy(name: str, to: str = "model") -> ModelDirectory:
        path = tmp_path / to
        path.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(GOLDENS / name / file, path / file)
        return ModelDirectory(path)

    return copy


@pytest.fixture
def narrow(directory: Callable[..., ModelDirectory]) -> ModelDirectory:
    """A model stored in bfloat16, with one value that bfloat16 has and few others do."""
    model = directory("qwen2_untied")
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in model.tensors.items()}
    tensors["model.norm.weight"][0] = 3.140625
    model.write(tensors)
    model.configure(torch_dtype="bfloat16")
    return model
