"""How much memory a device needs, for meshes that need not be there: the forecast of a run, as a Markdown table.

    python tools/memory.py [--config=configs/gsm8k.py] [--model=DIR ...] [--devices=8,64,256]

DIR is a Hugging Face directory, of which config.json is enough; without --model the table has the shapes of three Qwen2.5. Weights,
moments and reference are exact; see `jax_ppo.runtime.forecast.memory` for the rest. A micro-batch has one row a row shard.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax.sharding import AbstractMesh, AxisType

from jax_ppo import sharding
from jax_ppo.config import Config, resolve
from jax_ppo.models import hf
from jax_ppo.models.layers import QwenConfig
from jax_ppo.runtime import cli, forecast
from jax_ppo.steps import Steps
from jax_ppo.types import InputError

PARTS = ("actor", "critic", "reference", "gradients", "activations", "rollout")


def qwen25(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool) -> QwenConfig:
    """The shape of a Qwen2.5."""
    return QwenConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attention_bias=True,
        qk_norm=False,
    )


MODELS = {
    "Qwen2.5-0.5B": qwen25(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-7B": qwen25(3584, 18944, 28, 28, 4, 152064, tied=False),
    "Qwen2.5-32B": qwen25(5120, 27648, 64, 40, 8, 152064, tied=False),
}


def bytes_per_device(config: Config, model: QwenConfig, fsdp: int, tensor: int) -> dict[str, int]:
    """The forecast for actor and critic of one shape, on a mesh of fsdp x tensor devices."""
    mesh = AbstractMesh((1, fsdp, tensor), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    steps = Steps(config, model, model if config.has_critic else None, mesh)
    parts = forecast.memory(config, steps, (fsdp, config.max_sequence_tokens), config.data.max_prompt_tokens)
    return {**parts, "peak": forecast.peak(parts)}


def rows(config: Config, models: dict[str, QwenConfig], devices: Sequence[int]) -> Iterator[list[str]]:
    """The lines of the table: for each number of devices without `tensor`, and with the most that the key-value heads allow."""
    for name, model in models.items():
        for count in devices:
            for tensor in sorted({1, model.num_key_value_heads}):
                if count % tensor:
                    continue
                try:
                    found = bytes_per_device(config, model, count // tensor, tensor)
                except InputError:
                    continue  # a width that this mesh does not divide
                yield [name, str(count), str(count // tensor), str(tensor), *(forecast.size(found[p]) for p in (*PARTS, "peak"))]


def table(lines: Iterator[list[str]]) -> str:
    """The lines as Markdown."""
    heading = ["model", "devices", "fsdp", "tensor", *PARTS, "peak"]
    return "".join(f"| {' | '.join(line)} |\n" for line in [heading, ["---", *["--:"] * (len(heading) - 1)], *lines])


def work(words: Sequence[str]) -> None:
    """Prints the table.

    Raises:
      InputError: for wrong arguments, configuration or model directories.
    """
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "gsm8k.py")
    parser.add_argument("--model", type=Path, action="append", help="a directory with config.json; may be given several times")
    parser.add_argument("--devices", default="8,64,256", help="numbers of devices")
    arguments = parser.parse_args(words)
    counts = arguments.devices.split(",")
    if not all(count.isdigit() and int(count) for count in counts):
        raise InputError(f"--devices={arguments.devices}: must be numbers with commas between")
    raw = cli.load_config(arguments.config)
    raw.model.compute_dtype = "bfloat16" if raw.model.compute_dtype == "auto" else raw.model.compute_dtype
    models = {path.name: hf.load_config(path) for path in arguments.model} if arguments.model else MODELS
    sys.stdout.write(table(rows(resolve(raw), models, [int(count) for count in counts])))


if __name__ == "__main__":
    sys.exit(cli.exit_code(lambda: work(sys.argv[1:])))
