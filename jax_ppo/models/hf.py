"""Weights from and to Hugging Face directories: one table, read in both directions.

The one module of `models/` that touches files. Everything refused is an `InputError` of one line that names the file and the
tensor or key. Headers are checked before any weight is read, so a damaged directory costs seconds.
"""

import json
import shutil
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_ppo.models import qwen
from jax_ppo.models.layers import QwenConfig, Yarn
from jax_ppo.types import InputError, Params

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
NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
SIDE_FILES = ("generation_config.json", "tokenizer*", "vocab.json", "merges.txt", "*.jinja", "special_tokens_map.json", "added_tokens.json")
SHARD_BYTES = 5_000_000_000


def load_config(directory: str | Path) -> QwenConfig:
    """Reads the shape of a model from its config.json.

    A tied model whose file holds a head that differs from the embedding is read as untied, with a warning, as transformers
    does.

    Args:
      directory: a Hugging Face directory.

    Raises:
      InputError: if the directory, the file or a key is missing, or the model is not a dense Qwen2, Qwen2.5 or Qwen3.
    """
    directory = _check_directory(Path(directory))
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    kind = raw.get("model_type")
    if kind not in ("qwen2", "qwen3"):
        raise InputError(f"{path}: model_type {kind!r} unsupported; supported are qwen2 (Qwen2, Qwen2.5) and qwen3")
    for key, harmful in (("quantization_config", bool), ("use_sliding_window", bool)):
        if harmful(raw.get(key)):
            raise InputError(f"{path}: {key}={raw[key]!r} is unsupported; give a full-attention checkpoint in plain floating point")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"{path}: hidden_act {raw['hidden_act']!r} unsupported; must be 'silu'")
    try:
        config = _config(raw, path)
    except KeyError as error:
        raise InputError(f"{path}: key {error.args[0]!r} is missing") from None
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"{path}: num_attention_heads={config.num_attention_heads} is not a multiple of num_key_value_heads={config.num_key_value_heads}"
        )
    return _untied_if_different(directory, config)


def load_params(
    directory: str | Path, config: QwenConfig, *, dtype: Any, shardings: Params | None = None, head: str = "lm_head"
) -> Params:
    """Reads weights, each tensor straight to where it will live.

    Args:
      directory: a Hugging Face directory with safetensors.
      config:    from `load_config`.
      dtype:     of every parameter.
      shardings: `NamedSharding` per parameter, as the tree of parameters; default one device. Only the slices that this
                 process's devices hold are read.
      head:      "lm_head" for an actor. "score" for a critic: `score.weight` where the file has one, else zeros.

    Returns:
      The tree that `jax_ppo.models.qwen` describes.

    Raises:
      InputError: naming file and tensor, if one is missing, unknown, of another shape or type, or cut short.
    """
    with TensorFiles(Path(directory)) as files:
        shapes, fresh_head = _shapes(config, head), _fresh_head(files, head)
        _check_tensors(files, shapes, config, fresh_head)

        def leaf(path, shape, sharding):
            name, transposed = _row(path)
            if fresh_head and name == "score.weight":
                zeros = jnp.zeros(shape.shape, dtype)
                return zeros if sharding is None else jax.device_put(zeros, sharding)
            read = lambda index: _read(files, name, transposed, shape.shape, index, dtype)  # noqa: E731
            if sharding is None:
                return jnp.asarray(read((slice(None),) * len(shape.shape)))
            return jax.make_array_from_callback(shape.shape, sharding, read)

        if shardings is None:
            return jax.tree_util.tree_map_with_path(lambda p, s: leaf(p, s, None), shapes)
        return jax.tree_util.tree_map_with_path(leaf, shapes, shardings)


def save_params(params: Params, config: QwenConfig, directory: str | Path, *, dtype: Any, source: str | Path | None = None) -> None:
    """Writes a Hugging Face directory that transformers loads, old versions and new.

    Everything is written beside the target and renamed at the end.

    Args:
      params:    parameters of an actor or a critic.
      config:    their model.
      directory: the target; must not exist, or be empty.
      dtype:     of the tensors in the file, "float32" or "bfloat16".
      source:    a Hugging Face directory whose config.json, tokenizer, chat template and generation config are carried over.

    Raises:
      InputError: if the target has something in it.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory}: is not empty; nothing is overwritten, give another directory")
    beside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    name = jnp.dtype(dtype).name
    if source:
        copy_description(source, beside)
    (beside / "config.json").write_text(json.dumps(_config_json(config, name, "score" in params, source), indent=2) + "\n")
    _write_tensors(_tensors(params, config), jnp.dtype(dtype), beside)
    if directory.exists():
        directory.rmdir()
    beside.rename(directory)


def copy_description(source: str | Path, directory: str | Path) -> None:
    """Copies config.json, tokenizer, chat template and generation config, without the weights."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    for pattern in ("config.json", *SIDE_FILES):
        for file in Path(source).glob(pattern):
            shutil.copy(file, directory)


def stored_dtype(directory: str | Path) -> str:
    """The dtype in which a directory stores its embedding, "float32" or "bfloat16" (float16 and float64 widen to float32)."""
    with TensorFiles(Path(directory)) as files:
        return "bfloat16" if files.slice("model.embed_tokens.weight").get_dtype() == "BF16" else "float32"


def check_params(directory: str | Path, config: QwenConfig, *, head: str = "lm_head") -> None:
    """Raises what `load_params` would, from the headers alone."""
    with TensorFiles(Path(directory)) as files:
        _check_tensors(files, _shapes(config, head), config, _fresh_head(files, head))


class TensorFiles:
    """The tensors of a directory by name, opened lazily: one `model.safetensors`, or the shards of its index.

    where: tensor name -> file.
    """

    def __init__(self, directory: Path):
        self.directory = _check_directory(directory)
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        self._open: dict[Path, Any] = {}
        if single.exists():
            self.where = dict.fromkeys(self.file(single).keys(), single)
        elif index.exists():
            self.where = self._indexed(index)
        else:
            found = "only pytorch_model.bin; .bin is not supported, convert it to safetensors" if any(directory.glob("*.bin")) else "no weights"
            raise InputError(f"{directory}: {found} (looked for model.safetensors and model.safetensors.index.json)")

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)

    def file(self, path: Path) -> Any:
        """The open handle of a safetensors file."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="numpy").__enter__()
            except (SafetensorError, OSError, struct.error) as error:
                start = path.read_bytes()[:20] if path.stat().st_size < 1000 else b""
                hint = "a git-lfs pointer, not the file itself" if start.startswith(b"version https") else str(error)
                raise InputError(f"{path}: cannot be read, the download may be incomplete ({hint})") from None
        return self._open[path]

    def slice(self, name: str) -> Any:
        """A lazily read tensor."""
        return self.file(self.where[name]).get_slice(name)

    def _indexed(self, index: Path) -> dict[str, Path]:
        try:
            names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index}: not a usable index ({error!r})") from None
        where = {name: index.parent / file for name, file in names.items()}
        for path in sorted(set(where.values())):
            if not path.exists():
                raise InputError(f"{path}: named by {index.name} but missing; the download may be incomplete")
            for name in self.file(path).keys():  # noqa: SIM118
                if where.get(name) != path:
                    raise InputError(f"{path}: holds {name}, which {index.name} places in {where[name].name if name in where else 'no file'}")
        for name, path in where.items():
            if name not in self.file(path).keys():  # noqa: SIM118
                raise InputError(f"{path}: does not hold {name}, which {index.name} places there")
        return where


def _check_directory(directory: Path) -> Path:
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory")
    if (directory / "adapter_config.json").exists():
        raise InputError(f"{directory}: this is an adapter; merge it into its base model first")
    if not (directory / "config.json").exists():
        raise InputError(f"{directory}: config.json is missing")
    return directory


def _config(raw: Mapping[str, Any], path: Path) -> QwenConfig:
    theta, yarn = _rope(raw, path)
    heads, qwen3 = raw["num_attention_heads"], raw["model_type"] == "qwen3"
    return QwenConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or (128 if qwen3 else raw["hidden_size"] // heads),
        rope_theta=float(theta),
        rms_norm_eps=raw["rms_norm_eps"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        attention_bias=raw.get("attention_bias", False) if qwen3 else True,
        qk_norm=qwen3,
        yarn=yarn,
    )


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, Yarn | None]:
    """Base and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones)."""
    nested = raw.get("rope_parameters") or {}
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise InputError(f"{path}: rope_theta is missing, on top and inside rope_parameters")
    if raw.get("rope_theta", theta) != theta:
        raise InputError(f"{path}: rope_theta is {raw['rope_theta']} on top but {theta} inside rope_parameters")
    scaling = {**(raw.get("rope_scaling") or {}), **nested}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise InputError(f"{path}: rope type {kind!r} unsupported; supported are 'default' and 'yarn'")
    known = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
    unknown = set(scaling) - {*known, "rope_type", "type", "rope_theta"}
    if unknown:
        raise InputError(f"{path}: yarn key {min(unknown)!r} unsupported; supported are {', '.join(known)}")
    given = {k: scaling[k] for k in known if scaling.get(k) is not None}
    given.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    return theta, Yarn(**given)


def _untied_if_different(directory: Path, config: QwenConfig) -> QwenConfig:
    if not config.tie_word_embeddings or not list(directory.glob("*.safetensors*")):
        return config
    with TensorFiles(directory) as files:
        names = ("lm_head.weight", "model.embed_tokens.weight")
        if any(n not in files.where for n in names) or np.array_equal(*(files.slice(n)[:] for n in names)):
            return config
    warnings.warn(f"{directory}: tie_word_embeddings is true but lm_head.weight differs from the embedding; keeping the separate head", stacklevel=3)
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
    # An actor's file serves a critic and the other way round; each ignores the other's head. A tied head repeats the embedding.
    optional = {"score.weight", "lm_head.weight"} - set(expected) if not fresh_head else {"lm_head.weight", "score.weight"}
    for name in expected:
        if name not in files.where:
            if fresh_head and name == "score.weight":
                continue
            raise InputError(f"{files.directory}: tensor {name} is missing; it is never initialised afresh")
        tensor = files.slice(name)
        if tuple(tensor.get_shape()) != tuple(expected[name]):
            raise InputError(f"{files.where[name]}: tensor {name} has shape {tuple(tensor.get_shape())}, config.json asks for {expected[name]}")
        if tensor.get_dtype() not in NUMPY_DTYPES:
            raise InputError(f"{files.where[name]}: tensor {name} has dtype {tensor.get_dtype()}; supported are {', '.join(NUMPY_DTYPES)}")
    for name in files.where:
        if name not in expected and name not in optional and not name.endswith(HARMLESS):
            raise InputError(f"{files.where[name]}: tensor {name} is not part of a {'Qwen3' if config.qk_norm else 'Qwen2'} model of this config.json")


def _read(files: TensorFiles, name: str, transposed: bool, shape: tuple[int, ...], index: tuple[slice, ...], dtype: Any) -> np.ndarray:
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


def _tensors(params: Params, config: QwenConfig) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (how to fetch it, its number of elements), fetched one at a time so that a large model never stands on the host twice."""
    tensors: dict[str, tuple[Callable[[], Any], int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, transposed = _row(path)
        if "{}" not in name:
            tensors[name] = (lambda x=leaf, t=transposed: x.T if t else x, leaf.size)
            continue
        for i in range(config.num_hidden_layers):
            tensors[name.format(i)] = (lambda x=leaf, i=i, t=transposed: x[i].T if t else x[i], leaf.size // leaf.shape[0])
    return tensors


def _write_tensors(tensors: Mapping[str, tuple[Callable[[], Any], int]], dtype: np.dtype, directory: Path) -> None:
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, (_, size) in tensors.items():
        if size * dtype.itemsize > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size * dtype.itemsize
    count = len(shards)
    files = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for file, names in zip(files, shards, strict=True):
        # C order, because the writer dumps memory as it lies and a transposed view would come back as another matrix.
        arrays = {name: np.ascontiguousarray(np.asarray(tensors[name][0]()).astype(dtype)) for name in names}
        save_file(arrays, directory / file, metadata={"format": "pt"})
    if count > 1:
        index = {
            "metadata": {"total_size": sum(size for _, size in tensors.values()) * dtype.itemsize},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _config_json(config: QwenConfig, dtype: str, critic: bool, source: str | Path | None) -> dict[str, Any]:
    """config.json with both layouts of the rotary parameters, so that old and new readers agree."""
    raw = json.loads((Path(source) / "config.json").read_text(encoding="utf-8")) if source else {}
    family = "Qwen3" if config.qk_norm else "Qwen2"
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.yarn:
        rope = {"rope_type": "yarn", **{k: v for k, v in vars(config.yarn).items() if v is not None}}
    raw.pop("rope_scaling", None)
    fields = {k: v for k, v in vars(config).items() if k not in ("attention_bias", "qk_norm", "yarn")}
    head = {"architectures": [f"{family}ForSequenceClassification"], "num_labels": 1} if critic else {"architectures": [f"{family}ForCausalLM"]}
    return {
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "use_sliding_window": False,
        **raw,
        **fields,
        **({"attention_bias": config.attention_bias} if config.qk_norm else {}),
        **head,
        "model_type": family.lower(),
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        **({"rope_scaling": rope} if config.yarn else {}),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
