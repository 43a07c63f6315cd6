"""config.json: the layouts that exist in the wild read as one model, what is not computed is refused, and exports say it all."""

import json

import pytest
import tiny

from jax_ppo.models import hf, hf_config
from jax_ppo.models.layers import Yarn
from jax_ppo.types import InputError

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def refusal(path) -> str:
    """The one line with which a configuration is refused; it begins with the file."""
    with pytest.raises(InputError) as caught:
        hf.load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path / "config.json"))
    assert "\n" not in message
    return message


def test_every_field_of_qwen2(golden):
    assert hf.load_config(golden("qwen2_untied")) == tiny.model(rope_theta=1e6)


def test_explicit_head_size_of_qwen3(golden):
    """64 / 4 would be 16."""
    config = hf.load_config(golden("qwen3"))
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (64, 4, 32)
    assert config.qk_norm
    assert not config.attention_bias


@pytest.mark.parametrize("head_dim", ["gone", None])
def test_head_size_that_is_not_given(directory, gone, head_dim):
    """Width / heads for Qwen2; 128 for Qwen3, whatever its width."""
    value = gone if head_dim == "gone" else None
    for name, expected in (("qwen2_tied", 8), ("qwen3", 128)):
        model = directory(name, to=name)
        model.configure(head_dim=value)
        assert hf.load_config(model.path).head_dim == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 500000},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
)
def test_layouts_of_the_rotary_base(directory, gone, keys):
    model = directory("qwen2_tied")
    model.configure(**{"rope_parameters": gone, **keys})
    config = hf.load_config(model.path)
    assert config.rope_theta == 5e5
    assert config.yarn is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}}, Yarn(4.0, 64)),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}}, Yarn(4.0, 64)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}, Yarn(4.0, 64)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.0}},
            Yarn(4.0, 64, attention_factor=1.0),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2}},
            Yarn(4.0, 64, 16.0, 2.0),
        ),
        # transformers takes the length in the file for the original one where that is not given.
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}, Yarn(4.0, 256)),
    ],
)
def test_layouts_of_yarn(directory, gone, keys, expected):
    model = directory("qwen2_tied")
    model.configure(**{"rope_parameters": gone, **keys})
    config = hf.load_config(model.path)
    assert config.yarn == expected
    assert config.rope_theta == 1e6


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama' unsupported"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' unsupported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window=True is unsupported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' unsupported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' unsupported"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a positive whole number"),
        ({"hidden_size": "32"}, "hidden_size='32' must be a positive whole number"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 must be"),
        ({"vocab_size": True}, "vocab_size=True must be"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 must be a positive number"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rope_theta": 1e4}, "rope_theta is 10000.0 on top but 1000000.0 inside rope_parameters"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 must be a positive number"),
        ({"rope_parameters": [1e6]}, "inside rope_parameters must be an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": 1e6},
            "rope key 'full_attention' unsupported",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
            "rope type 'linear' unsupported",
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN}},
            "rope_type is 'yarn' inside rope_scaling but 'default' inside rope_parameters",
        ),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", **YARN, "mscale": 1.0}}, "rope key 'mscale' unsupported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 unsupported"),
    ],
)
def test_what_is_refused(directory, keys, words):
    model = directory("qwen2_tied")
    model.configure(**keys)
    assert words in refusal(model.path)


@pytest.mark.parametrize(
    "key",
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps".split(),
)
def test_a_missing_key_is_named(directory, gone, key):
    model = directory("qwen2_tied")
    model.configure(**{key: gone})
    assert f"key '{key}' is missing" in refusal(model.path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_not_json(directory, text):
    model = directory("qwen2_tied")
    (model.path / "config.json").write_bytes(text)
    assert "JSON" in refusal(model.path)


def test_the_family_decides_about_biases(directory):
    """Qwen2 has them always, whatever its file says. Qwen3 has none; with the key it would have one on o_proj as well."""
    model = directory("qwen2_tied", to="qwen2")
    model.configure(attention_bias=False)
    assert hf.load_config(model.path).attention_bias
    model = directory("qwen3", to="qwen3")
    model.configure(attention_bias=True)
    assert "attention_bias=True is unsupported for qwen3" in refusal(model.path)


# --- Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "qwen2_yarn", "qwen3"])
@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_and_read_again(golden, tmp_path, name, with_source, dtype):
    config = hf.load_config(golden(name))
    source = golden(name) / "config.json" if with_source else None
    hf_config.write(tmp_path / "config.json", config, dtype=dtype, critic=False, source=source)
    assert hf_config.read(tmp_path / "config.json") == config
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == dtype
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert written["architectures"] == ["Qwen3ForCausalLM" if name == "qwen3" else "Qwen2ForCausalLM"]
    assert written["rope_parameters"]["rope_type"] == ("yarn" if name == "qwen2_yarn" else "default")
    # Before version 5, transformers looked for YaRN in rope_scaling and nowhere else.
    assert written.get("rope_scaling", {}).get("factor") == (4.0 if name == "qwen2_yarn" else None)
    assert written["max_position_embeddings"] == (256 if with_source else 32768)


def test_old_keys_of_the_source_do_not_contradict(directory, gone, tmp_path):
    """A source in the old layout, exported as a model that is not scaled, must not keep the old scaling."""
    model = directory("qwen2_tied")
    plain = hf.load_config(model.path)
    model.configure(rope_parameters=gone, rope_theta=1e6, rope_scaling={"type": "yarn", **YARN}, torch_dtype="float16")
    hf_config.write(tmp_path / "config.json", plain, dtype="bfloat16", critic=False, source=model.path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" not in written
    assert written["torch_dtype"] == "bfloat16"
    assert hf_config.read(tmp_path / "config.json") == plain


def test_other_keys_of_the_source_are_kept(directory, tmp_path):
    model = directory("qwen2_tied")
    model.configure(eos_token_id=[5, 6], max_window_layers=17)
    hf_config.write(
        tmp_path / "config.json", hf.load_config(model.path), dtype="float32", critic=True, source=model.path / "config.json"
    )
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["eos_token_id"], written["max_window_layers"]) == ([5, 6], 17)
    assert (written["architectures"], written["num_labels"]) == (["Qwen2ForSequenceClassification"], 1)
