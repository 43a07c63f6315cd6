"""config.json of a Hugging Face directory: read into a `QwenConfig`, and written so that old and new readers agree.

What this package does not compute is refused, never ignored: a model that runs with the wrong rotary base or without its
sliding window gives text that is only a little worse, and nobody notices.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_ppo.models.layers import QwenConfig, Yarn
from jax_ppo.types import InputError

FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3"}
YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")


def read(path: Path) -> QwenConfig:
    """Reads the shape of a model.

    Args:
      path: of config.json.

    Raises:
      InputError: naming the key, if one is missing or out of range, or the model is not a dense Qwen2, Qwen2.5 or Qwen3.
    """
    raw = _object(path)
    _refuse_unsupported(raw, path)
    qwen3 = raw["model_type"] == "qwen3"
    heads, kv_heads = (_number(raw, key, path) for key in ("num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads:
        raise InputError(f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    hidden = _number(raw, "hidden_size", path)
    size = _number({"head_dim": 128 if qwen3 else hidden // heads, **_given(raw)}, "head_dim", path)
    if size % 2:
        raise InputError(f"{path}: head_dim={size} is odd; rotary embedding turns pairs")
    theta, yarn = _rope(raw, path)
    return QwenConfig(
        vocab_size=_number(raw, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=_number(raw, "intermediate_size", path),
        num_hidden_layers=_number(raw, "num_hidden_layers", path),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        rope_theta=theta,
        rms_norm_eps=_number(raw, "rms_norm_eps", path, whole=False),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        attention_bias=not qwen3,
        qk_norm=qwen3,
        yarn=yarn,
    )


def read_dtype(path: Path) -> str:
    """The dtype that a config.json states, under its new name or its old one: "bfloat16", or else "float32"."""
    raw = _object(path)
    return "bfloat16" if (raw.get("dtype") or raw.get("torch_dtype")) == "bfloat16" else "float32"


def write(path: Path, config: QwenConfig, *, dtype: str, critic: bool, source: Path | None) -> None:
    """Writes config.json with both layouts of the rotary parameters and of the dtype.

    Args:
      path:   of the file.
      config: the model.
      dtype:  of the tensors beside it.
      critic: whether the head is a scalar.
      source: a config.json whose other keys are carried over.
    """
    raw = json.loads(source.read_text(encoding="utf-8")) if source else {}
    family = "Qwen3" if config.qk_norm else "Qwen2"
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.yarn:
        rope = {"rope_type": "yarn", **_given(vars(config.yarn))}
    raw.pop("rope_scaling", None)
    fields = {k: v for k, v in vars(config).items() if k not in ("attention_bias", "qk_norm", "yarn")}
    head = (
        {"architectures": [f"{family}ForSequenceClassification"], "num_labels": 1}
        if critic
        else {"architectures": [f"{family}ForCausalLM"]}
    )
    described = {
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
    path.write_text(json.dumps(described, indent=2) + "\n")


def _object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: must be a JSON object, not a {type(raw).__name__}")
    return raw


def _refuse_unsupported(raw: Mapping[str, Any], path: Path) -> None:
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise InputError(f"{path}: model_type {kind!r} unsupported; supported are qwen2 (Qwen2, Qwen2.5) and qwen3")
    for key in ("quantization_config", "use_sliding_window"):
        if raw.get(key):
            raise InputError(
                f"{path}: {key}={raw[key]!r} is unsupported; give a full-attention checkpoint in plain floating point"
            )
    if kind == "qwen3" and raw.get("attention_bias"):
        raise InputError(f"{path}: attention_bias={raw['attention_bias']!r} is unsupported for qwen3, where it means o_proj too")
    other = set(raw.get("layer_types") or ()) - {"full_attention"}
    if other:
        raise InputError(f"{path}: layer_types with {min(other)!r} unsupported; every layer must be 'full_attention'")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"{path}: hidden_act {raw['hidden_act']!r} unsupported; must be 'silu'")


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, Yarn | None]:
    """Base and scaling, from `rope_parameters` (newer files), `rope_theta` and `rope_scaling` (older ones), or all of them."""
    top = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = _agreeing(
        {"on top": top, "inside rope_scaling": raw.get("rope_scaling"), "inside rope_parameters": raw.get("rope_parameters")},
        path,
    )
    if "rope_theta" not in rope:
        raise InputError(f"{path}: rope_theta is missing, on top and inside rope_parameters")
    theta = _number(rope, "rope_theta", path, whole=False)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']!r} unsupported; must be 1.0")
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise InputError(f"{path}: rope type {kind!r} unsupported; supported are 'default' and 'yarn'")
    unknown = set(rope) - {*YARN_KEYS, "rope_type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        raise InputError(f"{path}: rope key {min(unknown)!r} unsupported; supported are {', '.join(YARN_KEYS)}")
    if kind == "default":
        return theta, None
    context = {"original_max_position_embeddings": raw.get("max_position_embeddings"), **rope}
    return theta, Yarn(
        factor=_number(rope, "factor", path, whole=False),
        original_max_position_embeddings=_number(context, "original_max_position_embeddings", path),
        **{key: _number(rope, key, path, whole=False) for key in YARN_KEYS[2:] if key in rope},
    )


def _agreeing(places: Mapping[str, Mapping[str, Any] | None], path: Path) -> dict[str, Any]:
    """All that the places say; old files call the type "type", and null means not given."""
    merged: dict[str, tuple[Any, str]] = {}
    for place, said in places.items():
        if not isinstance(said or {}, dict):
            raise InputError(f"{path}: {said!r} {place} must be an object")
        for key, value in _given(said or {}).items():
            key = "rope_type" if key == "type" else key
            before, where = merged.setdefault(key, (value, place))
            if before != value:
                raise InputError(f"{path}: {key} is {before!r} {where} but {value!r} {place}")
    return {key: value for key, (value, _) in merged.items()}


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _number(raw: Mapping[str, Any], key: str, path: Path, *, whole: bool = True) -> Any:
    value = raw.get(key)
    if value is None:
        raise InputError(f"{path}: key {key!r} is missing")
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or value <= 0:
        raise InputError(f"{path}: {key}={value!r} must be a positive {'whole ' if whole else ''}number")
    return value if whole else float(value)
