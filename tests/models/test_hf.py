"""Conversion in both directions: what transformers wrote loads, what is written transformers loads, and nothing else passes."""

import json
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from jax_ppo import sharding
from jax_ppo.data import arithmetic
from jax_ppo.models import hf, qwen
from jax_ppo.types import InputError, RunError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = np.arange(24).reshape(2, 12)

logits = jax.jit(qwen.logits, static_argnames="config")


def load(path, **kwargs):
    """Parameters and configuration of an actor in float32."""
    config = hf.load_config(path)
    return hf.load_params(path, config, **({"dtype": "float32"} | kwargs)), config


def refusal(path, load=load, **kwargs) -> str:
    """The one line with which a directory is refused; it begins with the directory."""
    with pytest.raises(InputError) as caught:
        load(path, **kwargs)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def equal_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# --- Tied and untied heads ------------------------------------------------------------------------------------------------


def test_tied_with_and_without_the_repeated_head(directory):
    """Either way there is one parameter, and one tensor in an export."""
    without, repeated = directory("qwen2_tied", to="without"), directory("qwen2_tied", to="repeated")
    repeated.change(lm_head__weight=repeated.tensors[EMBEDDING])
    (first, config), (second, same) = load(without.path), load(repeated.path)
    assert config == same
    assert set(first) == set(second) == {"model"}
    jax.tree.map(np.testing.assert_array_equal, first, second)
    hf.save_params(second, same, repeated.path / "export", dtype="float32")
    assert HEAD not in load_file(repeated.path / "export" / "model.safetensors")


def test_tied_with_another_head(directory):
    """The file is believed, with a warning that names the tensor; the export says so in config.json."""
    plain, model = directory("qwen2_tied", to="plain"), directory("qwen2_tied")
    model.change(lm_head__weight=2 * model.tensors[EMBEDDING])
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding") as caught:
        params, config = load(model.path)
    assert str(caught[0].message).startswith(str(model.path))
    assert not config.tie_word_embeddings
    np.testing.assert_allclose(logits(params, config, TOKENS), 2 * logits(*load(plain.path), TOKENS), rtol=1e-6)
    hf.save_params(params, config, model.path / "export", dtype="float32", source=model.path)
    assert json.loads((model.path / "export" / "config.json").read_text())["tie_word_embeddings"] is False
    assert equal_bytes(load_file(model.path / "export" / "model.safetensors")[HEAD], model.tensors[HEAD])


def test_untied_without_a_head(directory):
    model = directory("qwen2_untied")
    model.drop(HEAD)
    message = refusal(model.path)
    assert f"tensor {HEAD} is missing" in message
    assert "never initialised afresh" in message


# --- Names, shapes and bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("qwen2_tied", 26), ("qwen2_untied", 27), ("qwen2_yarn", 26), ("qwen3", 24)])
def test_an_untouched_export_is_the_same_file(golden, tmp_path, name, count):
    """12 tensors a layer of Qwen2, 11 of Qwen3, the embedding, the norm, and the head where it is not tied."""
    params, config = load(golden(name))
    hf.save_params(params, config, tmp_path / "export", dtype="float32", source=golden(name))
    before, after = (load_file(path / "model.safetensors") for path in (golden(name), tmp_path / "export"))
    assert set(before) == set(after)
    assert len(after) == count
    for tensor in before:
        assert equal_bytes(before[tensor], after[tensor]), tensor


def test_shapes_of_qwen3(golden):
    """Heads of 32 in a model of width 64 with 4 heads, 2 for keys and values."""
    params, _ = load(golden("qwen3"))
    attention = jax.tree.map(jnp.shape, params["model"]["layers"]["self_attn"])
    assert attention == {
        "q_proj": {"kernel": (2, 64, 128)},
        "k_proj": {"kernel": (2, 64, 64)},
        "v_proj": {"kernel": (2, 64, 64)},
        "o_proj": {"kernel": (2, 128, 64)},
        "q_norm": {"weight": (2, 32)},
        "k_norm": {"weight": (2, 32)},
    }


def test_every_kernel_is_the_transposed_matrix_of_its_layer(directory):
    """q_proj and o_proj of this model are square, so that no shape would show them the wrong way round."""
    model = directory("qwen2_tied")
    params, _ = load(model.path)
    layers, tensors = params["model"]["layers"], model.tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    for part, matrices in {"self_attn": "q_proj k_proj v_proj o_proj", "mlp": "gate_proj up_proj down_proj"}.items():
        for matrix in matrices.split():
            for i in range(2):
                ours, theirs = layers[part][matrix]["kernel"][i], tensors[f"model.layers.{i}.{part}.{matrix}.weight"]
                np.testing.assert_array_equal(ours, np.array([theirs[:, j] for j in range(theirs.shape[1])]))
                assert not np.array_equal(theirs, theirs.T)


def test_an_actor_serves_a_critic_and_the_other_way_round(golden, tmp_path):
    """A critic from an actor's file gets a head of zeros; from a critic's file its own. Its backbone makes a tied actor."""
    critic, config = load(golden("qwen2_tied"), head="score")
    assert not np.any(critic["score"]["kernel"])
    head = np.random.default_rng(0).normal(size=(32, 1)).astype(np.float32)
    hf.save_params(critic | {"score": {"kernel": jnp.asarray(head)}}, config, tmp_path / "critic", dtype="float32")
    assert load_file(tmp_path / "critic" / "model.safetensors")["score.weight"].shape == (1, 32)
    again, _ = load(tmp_path / "critic", head="score")
    np.testing.assert_array_equal(again["score"]["kernel"], head)
    actor, _ = load(tmp_path / "critic")
    jax.tree.map(np.testing.assert_array_equal, actor, load(golden("qwen2_tied"))[0])


def test_a_critic_of_an_untied_actor(golden, tmp_path):
    """It leaves the actor's head out, and the file it writes is refused for an actor."""
    critic, config = load(golden("qwen2_untied"), head="score")
    assert set(critic) == {"model", "score"}
    hf.save_params(critic, config, tmp_path / "critic", dtype="float32")
    assert f"tensor {HEAD} is missing" in refusal(tmp_path / "critic")


# --- Types ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", jnp.float32, np.dtype("bfloat16")], ids=str)
def test_bfloat16_through_any_dtype_and_back(narrow, tmp_path, dtype):
    params, config = load(narrow.path, dtype=dtype)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert float(params["model"]["norm"]["weight"][0]) == 3.140625
    hf.save_params(params, config, tmp_path / "export", dtype="bfloat16", source=narrow.path)
    after = load_file(tmp_path / "export" / "model.safetensors")
    for name, before in narrow.tensors.items():
        assert equal_bytes(before, after[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_asked_for_is_the_dtype_of_everything(narrow, tmp_path, dtype):
    params, config = load(narrow.path)
    hf.save_params(params, config, tmp_path / "export", dtype=dtype, source=narrow.path)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {jnp.dtype(dtype)}
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == dtype
    assert hf.stored_dtype(tmp_path / "export") == dtype


def test_one_float32_norm_in_a_bfloat16_file(narrow):
    precise = np.full(32, 1 + 2**-20, np.float32)
    narrow.change(model__norm__weight=precise)
    params, _ = load(narrow.path)
    np.testing.assert_array_equal(params["model"]["norm"]["weight"], precise)
    params, _ = load(narrow.path, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert hf.stored_dtype(narrow.path) == "float32", "bfloat16 would round the norm"


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_widths(directory, dtype):
    """They widen, or narrow, to float32 and to nothing else."""
    model = directory("qwen2_tied")
    tensors = {name: x.astype(dtype) for name, x in model.tensors.items()}
    model.write(tensors)
    params, _ = load(model.path)
    np.testing.assert_array_equal(params["model"]["embed_tokens"]["weight"], tensors[EMBEDDING].astype(np.float32))
    assert hf.stored_dtype(model.path) == "float32"


# --- What an export is made of --------------------------------------------------------------------------------------------


@pytest.fixture
def described(directory):
    """A model with everything that stands beside weights, and things that should not be carried over."""
    model = directory("qwen2_tied")
    files = "generation_config.json tokenizer.json tokenizer_config.json vocab.json merges.txt chat_template.jinja README.md"
    for file in files.split():
        (model.path / file).write_text(f'"{file}"')
    for file in model.path.iterdir():
        file.chmod(0o444)
    return model


def test_side_files_are_copied(described, tmp_path):
    params, config = load(described.path)
    hf.save_params(params, config, tmp_path / "export", dtype="float32", source=described.path)
    expected = "generation_config.json tokenizer.json tokenizer_config.json vocab.json merges.txt chat_template.jinja".split()
    assert {file.name for file in (tmp_path / "export").iterdir()} == {*expected, "config.json", "model.safetensors"}
    for file in expected:
        assert (tmp_path / "export" / file).read_text() == f'"{file}"'
        assert os.stat(tmp_path / "export" / file).st_mode & 0o200, "the mode of the source came along"


def test_the_tokenizer_of_an_export_is_the_same(directory, tmp_path):
    model, tokenizer = directory("qwen2_tied"), arithmetic.tokenizer()
    tokenizer.save_pretrained(model.path)
    params, config = load(model.path)
    hf.save_params(params, config, tmp_path / "export", dtype="float32", source=model.path)
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = [{"role": "user", "content": "17 + 25 = ?"}]
    assert again.chat_template == tokenizer.chat_template
    assert again.apply_chat_template(text)["input_ids"] == tokenizer.apply_chat_template(text)["input_ids"]


def test_description_without_weights(described, tmp_path):
    """Enough for the configuration; asking it for weights says what is missing."""
    hf.write_description(load(described.path)[1], tmp_path / "new" / "description", dtype="float32", source=described.path)
    assert hf.load_config(tmp_path / "new" / "description") == hf.load_config(described.path)
    assert "no weights" in refusal(tmp_path / "new" / "description")


def test_metadata_of_the_file(golden, tmp_path):
    """Without it transformers refuses the file."""
    params, config = load(golden("qwen2_tied"))
    hf.save_params(params, config, tmp_path / "export", dtype="float32")
    with safe_open(tmp_path / "export" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert {file.name for file in (tmp_path / "export").iterdir()} == {"config.json", "model.safetensors"}


def test_a_description_says_what_was_loaded(directory, tmp_path):
    """A head that contradicts its config.json stays a head, though nothing but the description is there to say so."""
    model = directory("qwen2_tied")
    model.configure(torch_dtype="float16", dtype="float16")
    model.change(lm_head__weight=2 * model.tensors[EMBEDDING])
    with pytest.warns(UserWarning, match="keeping the separate head"):
        config = hf.load_config(model.path)
    hf.write_description(config, tmp_path / "description", dtype=hf.stored_dtype(model.path), source=model.path)
    assert hf.load_config(tmp_path / "description") == config
    assert hf.described_dtype(tmp_path / "description") == "float32"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float32"),
        ({"dtype": "float32"}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_dtype_that_a_description_states(directory, gone, keys, expected):
    model = directory("qwen2_tied")
    model.configure(**{"dtype": gone, "torch_dtype": gone} | keys)
    assert hf.described_dtype(model.path) == expected


def test_nothing_is_overwritten(golden, tmp_path):
    params, config = load(golden("qwen2_tied"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target, words in (("full", "is not empty"), ("file", "is a file")):
        with pytest.raises(InputError, match=words):
            hf.save_params(params, config, tmp_path / target, dtype="float32")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "full"]
    with pytest.raises(InputError, match=r"export\.partial: cannot be made \(Not a directory\)"):
        hf.save_params(params, config, tmp_path / "file" / "export", dtype="float32")
    (tmp_path / "empty").mkdir()
    hf.save_params(params, config, tmp_path / "empty", dtype="float32")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_failed_export_leaves_no_directory(golden, tmp_path, monkeypatch):
    """The target appears when it is complete; what an earlier failure left does not get into it."""
    params, config = load(golden("qwen2_tied"))

    def full_disk(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf.tensor_files, "write", full_disk)
        with pytest.raises(RunError, match="export: writing failed: No space left on device"):
            hf.save_params(params, config, tmp_path / "export", dtype="float32")
    assert not (tmp_path / "export").exists()
    (tmp_path / "export.partial" / "model-00001-of-00002.safetensors").write_text("half")
    hf.save_params(params, config, tmp_path / "export", dtype="float32")
    assert {file.name for file in tmp_path.rglob("*")} == {"export", "config.json", "model.safetensors"}


# --- Streaming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_one_shard_at_a_time_is_on_the_host(golden, monkeypatch, sizes):
    """When a part is read, every part before it is gone. The devices get copies here, as those with memory of their own do."""
    config, mesh = hf.load_config(golden("qwen2_untied")), sharding.make_mesh(*sizes)
    shapes = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
    places = sharding.parameter_specs(shapes, mesh)
    plain = hf.load_params(golden("qwen2_untied"), config, dtype="float32")
    read, put, alive, sizes_read = hf._read, jax.device_put, [], []

    def reading(*args):
        assert not [part for part in alive if part() is not None]
        part = read(*args)
        alive.append(weakref.ref(part))
        sizes_read.append(part.size)
        return part

    monkeypatch.setattr(hf, "_read", reading)
    monkeypatch.setattr(jax, "device_put", lambda part, device: put(np.array(part), device))
    params = hf.load_params(golden("qwen2_untied"), config, dtype="float32", shardings=places)
    leaves = jax.tree.leaves(params)
    assert len(sizes_read) > 2 * len(leaves)
    assert max(sizes_read) == max(x.addressable_shards[0].data.size for x in leaves)
    jax.tree.map(np.testing.assert_array_equal, params, plain)


@pytest.mark.parametrize(("name", "head", "count"), [("qwen2_tied", "lm_head", 26), ("qwen3", "score", 25)])
@pytest.mark.parametrize("places", [False, True])
def test_progress_counts_the_tensors_of_the_file(golden, tmp_path, name, head, count, places):
    config = hf.load_config(golden(name))
    shapes = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config, head=head))
    where = sharding.parameter_specs(shapes, sharding.make_mesh(2, 2, 2)) if places else None
    assert hf.tensor_count(config, head=head) == count
    steps: list[int] = []
    params = hf.load_params(golden(name), config, dtype="float32", shardings=where, head=head, progress=steps.append)
    assert sum(steps) == count
    steps.clear()
    hf.save_params(params, config, tmp_path / "export", dtype="float32", progress=steps.append)
    assert steps == [1] * count
    assert len(load_file(tmp_path / "export" / "model.safetensors")) == count


# --- What is refused ------------------------------------------------------------------------------------------------------


def test_no_such_directory(tmp_path):
    assert refusal(tmp_path / "nowhere").endswith("no such directory")
    (tmp_path / "model.safetensors").touch()
    assert "is a file, give its directory" in refusal(tmp_path / "model.safetensors")


@pytest.mark.parametrize("with_config", [True, False])
def test_pytorch_weights_only(directory, with_config):
    model = directory("qwen2_tied")
    (model.path / "model.safetensors").rename(model.path / "pytorch_model.bin")
    if not with_config:
        (model.path / "config.json").unlink()
    assert ".bin is not supported, convert it to safetensors" in refusal(model.path)
    assert refusal(model.path, hf.load_config) == refusal(model.path), "known before weights are asked for"


@pytest.mark.parametrize("merged", [True, False])
def test_an_adapter(directory, merged):
    """Also where the folder has the base model's configuration beside it."""
    model = directory("qwen2_tied")
    (model.path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    model.write({"base_model.model.layers.0.q_proj.lora_A.weight": np.zeros((4, 32), np.float32)}, "adapter_model.safetensors")
    if not merged:
        (model.path / "model.safetensors").unlink()
        (model.path / "config.json").unlink()
    assert "this is an adapter; merge it" in refusal(model.path)


def test_weights_without_config(directory):
    model = directory("qwen2_tied")
    (model.path / "config.json").unlink()
    assert "config.json is missing" in refusal(model.path)


def test_a_missing_bias(directory):
    model = directory("qwen2_tied")
    model.drop("model.layers.1.self_attn.k_proj.bias")
    message = "tensor model.layers.1.self_attn.k_proj.bias is missing"
    assert message in refusal(model.path)
    assert message in refusal(model.path, lambda path: hf.check_params(path, hf.load_config(path)))
    assert message in refusal(model.path, head="score")


def test_a_known_extra_tensor_is_noted(directory):
    model = directory("qwen2_tied")
    params, config = load(model.path)
    extra = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32) for i in range(2)}
    model.change(**extra)
    with pytest.warns(UserWarning, match=r"ignored model.*rotary_emb\.inv_freq \(2 of this kind\)"):
        again = hf.load_params(model.path, config, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, params, again)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias", "v_head.weight"])
def test_an_unknown_extra_tensor(directory, name):
    model = directory("qwen2_tied")
    model.change(**{name: np.ones((48, 32), np.float32)})
    message = refusal(model.path)
    assert f"tensor {name} is not part of a Qwen2 model" in message
    assert "model.safetensors" in message


def test_a_model_of_the_other_family(directory):
    model = directory("qwen3")
    model.configure(model_type="qwen2")
    assert "self_attn.k_proj.bias is missing" in refusal(model.path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vocab_size": 65}, "tensor model.embed_tokens.weight has shape (64, 32), config.json asks for (65, 32)"),
        ({"num_key_value_heads": 1}, "k_proj.bias has shape (16,), config.json asks for (8,)"),
        ({"intermediate_size": 32}, "down_proj.weight has shape (32, 48), config.json asks for (32, 32)"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2."),
        ({"num_hidden_layers": 1}, "tensor model.layers.1."),
    ],
)
def test_shapes_that_disagree_with_the_configuration(directory, keys, words):
    model = directory("qwen2_tied")
    model.configure(**keys)
    assert words in refusal(model.path)


def test_integers_are_no_weights(directory):
    model = directory("qwen2_tied")
    model.change(model__norm__weight=np.ones(32, np.int8))
    assert "tensor model.norm.weight has dtype I8; supported are F32, F16, BF16, F64" in refusal(model.path)


def test_headers_are_enough_to_refuse(golden, monkeypatch):
    """`check_params` accepts what loads, and reads no weight."""
    config = hf.load_config(golden("qwen2_untied"))
    monkeypatch.setattr(hf, "_read", lambda *_: pytest.fail("read a weight"))
    hf.check_params(golden("qwen2_untied"), config)
    hf.check_params(golden("qwen2_untied"), config, head="score")


def test_a_parameter_without_a_row(golden, tmp_path):
    params, config = load(golden("qwen2_tied"))
    with pytest.raises(InputError, match=r"parameter adapter/kernel: no row in models\.hf\.TABLE"):
        hf.save_params(params | {"adapter": {"kernel": jnp.ones((2, 2))}}, config, tmp_path / "export", dtype="float32")
