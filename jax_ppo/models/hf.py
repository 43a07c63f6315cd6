"""Weights from and to Hugging Face directories: one table, read in both directions.

Everything refused is an `InputError` of one line that names the file and the tensor or key. Headers are checked before any
weight is read, so a damaged directory costs seconds. config.json is the business of `hf_config`, safetensors of `tensor_files`.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models import hf_config, qwen, tensor_files
from jax_ppo.models.layers import QwenConfig
from jax_ppo.models.tensor_files import NUMPY_DTYPES, Tensor, TensorFiles
from jax_ppo.sharding import fetch
from jax_ppo.types import InputError, Params, RunError

# Our path -> (Hugging Face name, is the matrix transposed). {} is the layer.
TABLE: dict[str, tuple[str, bool]] = {
    "model/embed_tokens/weight": ("model.embed_tokens.weight", False),
    "model/norm/weight": ("model.norm.weight", False),
    "lm_head/kernel": ("lm_head.weight", True),
    "score/kernel": ("score.weight", True),
    "model/layers/input_layernorm/weight": ("model.layers.{}.input_layernorm.weight", False),
    "model/layers/post_attention_layernorm/weight": ("model.layers.{}.post_attention_layernorm.weight", False),
    "model/layers/self_attn/q_proj/kernel": ("model.layers.{}.self_attn.q_proj.weight", True),
    "model/layers/self_attn/k_proj/kernel": ("model.layers.{}.self_attn.k_proj.weight", True),
    "model/layers/self_attn/v_proj/kernel": ("model.layers.{}.self_attn.v_proj.weight", True),
    "model/layers/self_attn/o_proj/kernel": ("model.layers.{}.self_attn.o_proj.weight", True),
    "model/layers/self_attn/q_proj/bias": ("model.layers.{}.self_attn.q_proj.bias", False),
    "model/layers/self_attn/k_proj/bias": ("model.layers.{}.self_attn.k_proj.bias", False),
    "model/layers/self_attn/v_proj/bias": ("model.layers.{}.self_attn.v_proj.bias", False),
    "model/layers/self_attn/q_norm/weight": ("model.layers.{}.self_attn.q_norm.weight", False),
    "model/layers/self_attn/k_norm/weight": ("model.layers.{}.self_attn.k_norm.weight", False),
    "model/layers/mlp/gate_proj/kernel": ("model.layers.{}.mlp.gate_proj.weight", True),
    "model/layers/mlp/up_proj/kernel": ("model.layers.{}.mlp.up_proj.weight", True),
    "model/layers/mlp/down_proj/kernel": ("model.layers.{}.mlp.down_proj.weight", True),
}

# Tensors some exporters add, which follow from the configuration.
HARMLESS = "rotary_emb.inv_freq"
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)


def load_config(directory: str | Path) -> QwenConfig:
    """Reads the shape of a model from its config.json.

    A tied model whose file holds a head that differs from the embedding is read as untied, with a warning, as transformers
    does.

    Args:
      directory: a Hugging Face directory.

    Raises:
      InputError: if the directory, the file or a key is missing, or the model is not a dense Qwen2, Qwen2.5 or Qwen3.
    """
    directory = tensor_files.check_directory(Path(directory))
    return _untied_if_different(directory, hf_config.read(directory / "config.json"))


def load_params(
    directory: str | Path,
    config: QwenConfig,
    *,
    dtype: Any,
    shardings: Params | None = None,
    head: str = "lm_head",
    progress: Callable[[int], Any] = lambda tensors: None,
) -> Params:
    """Reads weights, each tensor straight to where it will live.

    Args:
      directory: a Hugging Face directory with safetensors.
      config:    from `load_config`.
      dtype:     of every parameter.
      shardings: `NamedSharding` per parameter, as the tree of parameters; default one device. Only the slices that this
                 process's devices hold are read.
      head:      "lm_head" for an actor. "score" for a critic: `score.weight` where the file has one, else zeros.
      progress:  called with the number of tensors that have just been read; `tensor_count` of them in all.

    Returns:
      The tree that `jax_ppo.models.qwen` describes.

    Raises:
      InputError: naming file and tensor, if one is missing, unknown, of another shape or type, or cut short.
    """
    with TensorFiles(directory) as files:
        shapes, fresh_head = _shapes(config, head), _fresh_head(files, head)
        _check_tensors(files, shapes, config, fresh_head)

        def leaf(path, shape, sharding):
            name, transposed = _row(path)

            def read(index):
                if fresh_head and name == "score.weight":
                    return np.zeros(shape.shape, jnp.dtype(dtype))[index]
                return _read(files, name, transposed, shape.shape, index, dtype)

            array = _placed(shape.shape, sharding, read)
            files.release()
            progress(shape.shape[0] if "{}" in name else 1)
            return array

        if shardings is None:
            return jax.tree_util.tree_map_with_path(lambda p, s: leaf(p, s, None), shapes)
        return jax.tree_util.tree_map_with_path(leaf, shapes, shardings)


def save_params(
    params: Params,
    config: QwenConfig,
    directory: str | Path,
    *,
    dtype: Any,
    source: str | Path | None = None,
    progress: Callable[[int], Any] = lambda tensors: None,
) -> None:
    """Writes a Hugging Face directory that transformers loads, old versions and new.

    Of several processes each must call this, for the parts of the parameters that it holds; the first one writes.

    Args:
      params:    parameters of an actor or a critic.
      config:    their model.
      directory: the target; must not exist, or be empty.
      dtype:     of the tensors in the file, "float32" or "bfloat16".
      source:    a Hugging Face directory whose config.json, tokenizer, chat template and generation config are carried over.
      progress:  called with the number of tensors that are about to be written; `tensor_count` of them in all.

    Raises:
      InputError, RunError: see `new_directory`.
    """
    tensors = _tensors(params)
    if jax.process_index():
        for tensor in tensors.values():
            tensor.fetch()
            progress(1)
        return
    with new_directory(directory) as beside:
        write_description(config, beside, dtype=dtype, critic="score" in params, source=source)
        tensor_files.write(tensors, jnp.dtype(dtype), beside, progress)


def check_new(directory: str | Path) -> Path:
    """The absolute path of a target to write to.

    Raises:
      InputError: if it is a file, or has something in it.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory}: is a file; nothing is overwritten, give a directory")
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory}: is not empty; nothing is overwritten, give another directory")
    return directory


@contextmanager
def new_directory(directory: str | Path) -> Iterator[Path]:
    """A directory beside the target to write into; it takes the place of the target when the block ends without an error.

    Raises:
      InputError: see `check_new`; or if the directory cannot be made.
      RunError: if writing fails, for instance on a full disk.
    """
    directory = check_new(directory)
    beside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{beside}: cannot be made ({error.strerror})") from None
    try:
        yield beside
        if directory.exists():
            directory.rmdir()
        beside.rename(directory)
    except OSError as error:
        raise RunError(f"{directory}: writing failed: {error}") from error


def write_description(
    config: QwenConfig, directory: str | Path, *, dtype: Any, critic: bool = False, source: str | Path | None = None
) -> None:
    """Writes what stands beside the weights: config.json, tokenizer, chat template and generation config.

    Args:
      config:    the model.
      directory: where to; made if it is missing.
      dtype:     of the weights.
      critic:    whether the head is a scalar.
      source:    a Hugging Face directory to copy from; without one there is a config.json only.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    for pattern in SIDE_FILES if source else ():
        for file in Path(source or "").glob(pattern):
            if file.is_file():
                # The content without the mode: what is read-only at the source is rewritten here.
                shutil.copyfile(file, Path(directory) / file.name)
    hf_config.write(
        Path(directory) / "config.json",
        config,
        dtype=jnp.dtype(dtype).name,
        critic=critic,
        source=Path(source) / "config.json" if source else None,
    )


def stored_dtype(directory: str | Path) -> str:
    """The dtype that holds every tensor of a directory: "bfloat16" where all are, else "float32" (to which float64 is rounded)."""
    with TensorFiles(directory) as files:
        return "bfloat16" if all(files.slice(name).get_dtype() == "BF16" for name in files.where) else "float32"


def described_dtype(directory: str | Path) -> str:
    """The dtype that config.json states: "bfloat16", or else "float32"."""
    return hf_config.read_dtype(Path(directory) / "config.json")


def stored_head(directory: str | Path) -> str:
    """What the weights of a directory are for: "score" where it has `score.weight`, else "lm_head"."""
    with TensorFiles(directory) as files:
        return "score" if "score.weight" in files.where else "lm_head"


def tensor_count(config: QwenConfig, *, head: str = "lm_head") -> int:
    """How many tensors the files of a model have."""
    return len(_hf_shapes(_shapes(config, head)))


def check_params(directory: str | Path, config: QwenConfig, *, head: str = "lm_head") -> None:
    """Raises what `load_params` would, from the headers alone."""
    with TensorFiles(directory) as files:
        _check_tensors(files, _shapes(config, head), config, _fresh_head(files, head))


def _untied_if_different(directory: Path, config: QwenConfig) -> QwenConfig:
    if not config.tie_word_embeddings or not list(directory.glob("*.safetensors*")):
        return config
    with TensorFiles(directory) as files:
        names = ("lm_head.weight", "model.embed_tokens.weight")
        if any(n not in files.where for n in names) or np.array_equal(*(files.slice(n)[:] for n in names)):
            return config
    warnings.warn(
        f"{directory}: tie_word_embeddings is true but lm_head.weight differs from the embedding; keeping the separate head",
        stacklevel=3,
    )
    return QwenConfig(**{**vars(config), "tie_word_embeddings": False})


def _shapes(config: QwenConfig, head: str) -> Params:
    return jax.eval_shape(lambda: qwen.init(jax.random.key(0), config, head=head))


def _fresh_head(files: TensorFiles, head: str) -> bool:
    return head == "score" and "score.weight" not in files.where


def _row(path: tuple[Any, ...]) -> tuple[str, bool]:
    ours = "/".join(str(p.key) for p in path)
    if ours not in TABLE:
        raise InputError(f"parameter {ours}: no row in models.hf.TABLE")
    return TABLE[ours]


def _hf_shapes(shapes: Params) -> dict[str, tuple[int, ...]]:
    """The shape every tensor of the file must have."""
    expected: dict[str, tuple[int, ...]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name, transposed = _row(path)
        layered = "{}" in name
        shape = leaf.shape[1:] if layered else leaf.shape
        shape = shape[::-1] if transposed else shape
        expected |= {name.format(i): shape for i in range(leaf.shape[0])} if layered else {name: shape}
    return expected


def _check_tensors(files: TensorFiles, shapes: Params, config: QwenConfig, fresh_head: bool) -> None:
    expected = _hf_shapes(shapes)
    if fresh_head:
        del expected["score.weight"]
    for name, shape in expected.items():
        if name not in files.where:
            raise InputError(f"{files.listing}: tensor {name} is missing; it is never initialised afresh")
        tensor, file = files.slice(name), files.where[name]
        if tuple(tensor.get_shape()) != shape:
            raise InputError(f"{file}: tensor {name} has shape {tuple(tensor.get_shape())}, config.json asks for {shape}")
        if tensor.get_dtype() not in NUMPY_DTYPES:
            raise InputError(f"{file}: tensor {name} has dtype {tensor.get_dtype()}; supported are {', '.join(NUMPY_DTYPES)}")
    # An actor's file serves a critic and the other way round; each ignores the other's head. A tied head repeats the embedding.
    extra = [name for name in files.where if name not in {*expected, "lm_head.weight", "score.weight"}]
    for name in extra:
        if not name.endswith(HARMLESS):
            family = "Qwen3" if config.qk_norm else "Qwen2"
            raise InputError(f"{files.where[name]}: tensor {name} is not part of a {family} model of this config.json")
    if extra:
        warnings.warn(
            f"{files.directory}: ignored {extra[0]} ({len(extra)} of this kind), which follows from config.json", stacklevel=3
        )


def _placed(shape: tuple[int, ...], sharding: Any, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """One parameter on its devices. Each distinct part is read once, and is gone from the host before the next one is read."""
    if sharding is None:
        return jnp.asarray(read((slice(None),) * len(shape)))
    holders: dict[tuple[Any, ...], list[Any]] = {}
    places = sharding.addressable_devices_indices_map(shape)
    for device, index in places.items():
        holders.setdefault(tuple((s.start, s.stop) for s in index), []).append(device)
    arrays: list[jax.Array] = []
    for devices in holders.values():
        part = read(places[devices[0]])
        arrays += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        del part  # or it would be there until the next one has been read
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(
    files: TensorFiles, name: str, transposed: bool, shape: tuple[int, ...], index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    """The part `index` of one parameter, converted; reads no more than that from disk."""
    if "{}" not in name:
        return _read_matrix(files, name, transposed, index, dtype)
    layers = range(*index[0].indices(shape[0]))
    first = _read_matrix(files, name.format(layers[0]), transposed, index[1:], dtype)
    out = np.empty((len(layers), *first.shape), first.dtype)
    out[0] = first
    for row, layer in enumerate(layers[1:], start=1):
        out[row] = _read_matrix(files, name.format(layer), transposed, index[1:], dtype)
    return out


def _read_matrix(files: TensorFiles, name: str, transposed: bool, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    part = files.slice(name)[index[::-1] if transposed else index]
    return (part.T if transposed else part).astype(jnp.dtype(dtype))


def _tensors(params: Params) -> dict[str, Tensor]:
    """Every tensor of a parameter tree by its name in the file."""
    tensors: dict[str, Tensor] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, transposed = _row(path)
        if "{}" not in name:
            tensors[name] = Tensor(leaf.size, partial(_matrix, leaf, None, transposed))
            continue
        for i in range(leaf.shape[0]):
            tensors[name.format(i)] = Tensor(leaf.size // leaf.shape[0], partial(_matrix, leaf, i, transposed))
    return tensors


def _matrix(leaf: jax.Array, layer: int | None, transposed: bool) -> np.ndarray:
    part = fetch(leaf if layer is None else leaf[layer])
    return part.T if transposed else part
