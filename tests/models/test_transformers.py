"""What is exported, loaded by transformers and computed with torch; skipped where torch is not installed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import transformers

from jax_ppo.models import hf, qwen

torch = pytest.importorskip("torch", reason="compares with transformers, which computes with torch")

MODELS = ("qwen2_tied", "qwen2_untied", "qwen2_yarn", "qwen3")
TOKENS = np.arange(24).reshape(2, 12)

logits = jax.jit(qwen.logits, static_argnames="config")


def load(path, head="lm_head"):
    """Parameters in float32, and configuration."""
    config = hf.load_config(path)
    return hf.load_params(path, config, dtype="float32", head=head), config


def by_transformers(path: Path, kind: str = "AutoModelForCausalLM", dtype: str = "float32"):
    """A model as transformers loads it, which must find every tensor it looks for and use all that it finds."""
    model, report = getattr(transformers, kind).from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_export(golden, tmp_path, name):
    """Also after a change to every weight, so that nothing can come from anywhere else; and the golden logits are its own."""
    with np.load(golden(name) / "logits.npz") as file, torch.no_grad():
        tokens, expected = file["tokens"], file["logits"]
        again = by_transformers(golden(name))(torch.tensor(tokens)).logits.numpy()
    assert np.max(np.abs(again - expected)) < 1e-4 * expected.std()
    params, config = load(golden(name))
    params = jax.tree.map(lambda x: 0.9 * x, params)
    hf.save_params(params, config, tmp_path / "export", dtype="float32", source=golden(name))
    with torch.no_grad():
        theirs = by_transformers(tmp_path / "export")(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(logits(params, config, tokens))
    assert np.max(np.abs(ours - theirs)) < 1e-4 * theirs.std()
    assert np.max(np.abs(ours - expected)) > 0.01 * theirs.std()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}], ids=str)
def test_padding_and_packing_in_a_qwen3_without_a_golden(tmp_path, changes):
    """Untied as the larger ones are, and tied: two packed sequences, one of them padded on its left, as transformers computes each alone."""
    config = tiny.model(qk_norm=True, attention_bias=False, **changes)
    params = tiny.redrawn(0, config)
    hf.save_params(params, config, tmp_path / "export", dtype="float32")
    assert hf.load_config(tmp_path / "export") == config
    model = by_transformers(tmp_path / "export")
    first, second = np.arange(12), np.arange(40, 60)
    segments = np.array([1] * 12 + [0] * 3 + [2] * 20)
    positions = np.concatenate([np.arange(12), np.zeros(3, int), np.arange(20)])
    row = np.concatenate([first, np.full(3, 63), second])
    ours = np.asarray(logits(params, config, row[None], positions=positions[None], segment_ids=segments[None]))[0]
    for tokens, segment in ((first, 1), (second, 2)):
        left = np.concatenate([np.full(3, 63), tokens])[None]
        real = (np.arange(left.shape[1]) >= 3)[None].astype(int)
        with torch.no_grad():
            alone = model(torch.tensor(tokens[None])).logits.numpy()[0]
            places = torch.tensor(np.maximum(real.cumsum(1) - 1, 0))
            padded = model(torch.tensor(left), attention_mask=torch.tensor(real), position_ids=places).logits.numpy()[0, 3:]
        mine = np.asarray(logits(params, config, left, positions=places.numpy(), segment_ids=real))[0, 3:]
        assert np.max(np.abs(ours[segments == segment] - alone)) < 1e-4 * alone.std()
        assert np.max(np.abs(mine - padded)) < 1e-4 * padded.std()


def test_transformers_keeps_a_head_that_differs(directory):
    """What `load_config` says it does where the flag and the file disagree."""
    model = directory("qwen2_tied")
    model.change(lm_head__weight=2 * model.tensors["model.embed_tokens.weight"])
    with pytest.warns(UserWarning, match="keeping the separate head"):
        params, config = load(model.path)
    with torch.no_grad():
        theirs = by_transformers(model.path)(torch.tensor(TOKENS)).logits.numpy()
    assert np.max(np.abs(np.asarray(logits(params, config, TOKENS)) - theirs)) < 1e-4 * theirs.std()


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3"])
def test_transformers_loads_a_critic(golden, tmp_path, name):
    """Its score of a sequence is the value at the last token."""
    critic, config = load(golden(name), head="score")
    head = np.random.default_rng(0).normal(size=critic["score"]["kernel"].shape).astype(np.float32)
    critic["score"]["kernel"] = jnp.asarray(head)
    hf.save_params(critic, config, tmp_path / "critic", dtype="float32", source=golden(name))
    positions, ones = np.tile(np.arange(12), (2, 1)), np.ones_like(TOKENS)
    hidden, _ = qwen.hidden_states(critic, config, jnp.asarray(TOKENS), positions, ones, dtype=jnp.float32)
    model = by_transformers(tmp_path / "critic", "AutoModelForSequenceClassification")
    model.config.pad_token_id = 63
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()[:, 0]
    np.testing.assert_allclose(qwen.values(critic, hidden)[:, -1], theirs, atol=1e-4)
    assert np.abs(theirs).min() > 0.01


def test_transformers_reads_bfloat16(narrow, tmp_path):
    params, config = load(narrow.path)
    hf.save_params(params, config, tmp_path / "export", dtype="bfloat16", source=narrow.path)
    state = by_transformers(tmp_path / "export", dtype="bfloat16").state_dict()
    for name, before in narrow.tensors.items():
        np.testing.assert_array_equal(state[name].view(torch.uint16).numpy(), before.view(np.uint16), err_msg=name)
