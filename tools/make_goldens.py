"""Writes tests/goldens: tiny Qwen models as transformers saves them, with the logits that transformers computes.

    pip install torch
    python tools/make_goldens.py [DIRECTORY]

The tests compare with what is committed, so they need no torch. Every weight is drawn far from what a fresh model has: with
std 0.02, norms of 1 and biases of 0, a wrong rotary base or a dropped bias would hide in the noise.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROWS, LENGTH, PADDING, VOCABULARY = 2, 24, 7, 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
MODELS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=False)),
    "qwen2_yarn": (Qwen2ForCausalLM, Qwen2Config(**{**SMALL, "rope_parameters": YARN}, tie_word_embeddings=True)),
    # Heads of 32 where width / heads is 16, as Qwen3-4B has 128 where it is 80.
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**{**SMALL, "hidden_size": 64}, head_dim=32, tie_word_embeddings=True)),
}
# transformers writes the rotary base into `rope_parameters`; files from before its version 5 have these keys on top instead.
OLD_LAYOUT = ("qwen2_untied",)


def draw(model: torch.nn.Module, seed: int) -> None:
    """Weights and biases normal with std 0.2, norms 1 + 0.3 normal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)


def logits(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Random tokens, their logits, and the logits where the first columns of the last row are padding."""
    tokens = np.random.RandomState(seed).randint(0, VOCABULARY, (ROWS, LENGTH))
    real = np.ones((ROWS, LENGTH), np.int64)
    real[-1, :PADDING] = 0
    with torch.no_grad():
        plain = model(torch.tensor(tokens)).logits
        positions = torch.tensor(np.maximum(real.cumsum(1) - 1, 0))
        padded = model(torch.tensor(tokens), attention_mask=torch.tensor(real), position_ids=positions).logits
    return {
        "tokens": tokens.astype(np.int32),
        "real": real.astype(bool),
        "logits": plain.numpy(),
        "padded_logits": padded.numpy(),
    }


def main(directory: Path) -> None:
    """Writes one folder a model: config.json, model.safetensors, logits.npz."""
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        draw(model, seed)
        folder = directory / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        if name in OLD_LAYOUT:
            path = folder / "config.json"
            described = json.loads(path.read_text())
            described |= {"rope_theta": described.pop("rope_parameters")["rope_theta"], "torch_dtype": described.pop("dtype")}
            path.write_text(json.dumps(described, indent=2) + "\n")
        np.savez(folder / "logits.npz", **logits(model, seed))
        print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "tests" / "goldens")
