"""Weights between Hugging Face directories and checkpoints.

    python tools/convert_hf.py import HF_DIR CKPT_DIR [--dtype=float32]
    python tools/convert_hf.py export CKPT_DIR HF_DIR [--which=critic] [--dtype=bfloat16]

An import is a workdir with a checkpoint 0 of the actor, or of the critic where HF_DIR has `score.weight`; `jax_ppo.evaluate` reads
it. An export takes the newest whole checkpoint of a workdir, or that of WORKDIR/checkpoints/N; adapters are merged. Parameters are spread over all
devices and change their dtype only where they are written. Both directions write beside the target and rename at the end.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from jax_ppo import sharding
from jax_ppo.evaluate import restore_network
from jax_ppo.models import hf, qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.runtime import checkpoint, cli
from jax_ppo.runtime.display import Display
from jax_ppo.types import InputError, Params

DTYPES = ("float32", "bfloat16")
HEADS = {"actor": "lm_head", "critic": "score"}


def import_model(source: Path, target: Path, dtype: str | None = None) -> None:
    """Writes a workdir with one checkpoint from a Hugging Face directory.

    Args:
      source: the Hugging Face directory.
      target: the workdir; must not exist, or be empty.
      dtype:  of the parameters; default the one that holds what is there exactly.

    Raises:
      InputError: if the source is refused, or something is in the way.
    """
    hf.check_new(target)
    config = hf.load_config(source)
    stored, head = hf.stored_dtype(source), hf.stored_head(source)
    which = next(name for name in HEADS if HEADS[name] == head)
    hf.check_params(source, config, head=head)
    shardings = places(config, which)[1]
    with hf.new_directory(target) as beside, Display(0) as display:
        hf.write_description(config, beside / "model", dtype=stored, critic=which == "critic", source=source)
        bar = display.bar("reading", hf.tensor_count(config, head=head))
        params = hf.load_params(source, config, dtype=dtype or stored, shardings=shardings, head=head, progress=bar)
        checkpoint.save_params(beside, params, which)
    display.say(f"{target}: {which} in {dtype or stored}")


def export_model(source: Path, target: Path, which: str = "actor", dtype: str | None = None) -> None:
    """Writes a Hugging Face directory from a checkpoint.

    Args:
      source: a workdir, for its newest whole checkpoint, or WORKDIR/checkpoints/N.
      target: the Hugging Face directory; must not exist, or be empty.
      which:  "actor" or "critic".
      dtype:  of the tensors; default what the model that the run started from states.

    Raises:
      InputError: if there is no such checkpoint that can be read, or something is in the way.
    """
    hf.check_new(target)
    workdir, iteration = checkpoint.locate(source)
    if not (workdir / checkpoint.FOLDER).is_dir():
        raise InputError(f"{source}: neither a workdir with checkpoints nor one of its checkpoints")
    own = workdir / "critic"
    description = own if which == "critic" and own.is_dir() else workdir / "model"
    config = hf.load_config(description)
    dtype = dtype or hf.described_dtype(description)
    with Display(0) as display:
        done, params = restore_network(workdir, config, sharding.make_mesh(1, -1, 1), which, display, iteration=iteration)
        bar = display.bar("writing", hf.tensor_count(config, head=HEADS[which]))
        hf.save_params(params, config, target, dtype=dtype, source=description, progress=bar)
    display.say(f"{target}: {which} of iteration {done} in {dtype}")


def places(config: QwenConfig, which: str) -> tuple[Params, Params]:
    """Shapes of the parameters, and where each lives: split over all devices."""
    shapes = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config, head=HEADS[which]))
    return shapes, sharding.parameter_specs(shapes, sharding.make_mesh(1, -1, 1))


def parse(words: list[str]) -> dict[str, Any]:
    """The command line, as `command` and the arguments of its function."""
    about, *details = (__doc__ or "").splitlines()
    parser = cli.Parser(description=about, epilog="\n".join(details), formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{import,export}")
    for name, source, target in (("import", "HF_DIR", "CKPT_DIR"), ("export", "CKPT_DIR", "HF_DIR")):
        command = commands.add_parser(name, help=f"{source} -> {target}")
        command.add_argument("source", metavar=source, type=Path)
        command.add_argument("target", metavar=target, type=Path)
        command.add_argument("--dtype", choices=DTYPES)
        if name == "export":
            command.add_argument("--which", choices=tuple(HEADS), default="actor")
    return vars(parser.parse_args(words))


def main(words: list[str]) -> int:
    """Parses the command line and converts; returns the exit code, as that of `jax_ppo.main`."""

    def work() -> None:
        arguments = parse(words)
        {"import": import_model, "export": export_model}[arguments.pop("command")](**arguments)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
