"""The command line: flags to configuration, and mistakes to one line and an exit code."""

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from jax_ppo.config import Config, resolve
from jax_ppo.types import InputError, RunError


def main(argv: Sequence[str], job: Callable[[Config, Any], Any], *, module: str, strings: dict[str, str] | None = None) -> int:
    """Parses the command line and does the job.

    Args:
      argv:    program name, then flags.
      job:     called as job(config, values); values has `config_path`, `workdir` and the extra flags as attributes.
      module:  for the usage line.
      strings: further text flags and what they mean; required.

    Returns:
      0; 2 after one line about a wrong input; 1 after one line about a failure while running. Anything unforeseen is raised.
    """
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        config, values = parse(argv, module=module, strings=strings or {})
        job(config, values)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str], *, module: str, strings: dict[str, str]) -> tuple[Config, Any]:
    """The resolved configuration and the flag values.

    Raises:
      InputError: for an unknown or repeated flag, a word that is no flag, a missing flag, a wrong value, or a config file that
        cannot be run.
    """
    required = ["config", *strings]
    usage = f"usage: python -m {module} --config=configs/X.py {''.join(f'--{s}=... ' for s in strings)}[--workdir=DIR] [--config.SECTION.KEY=VALUE ...]"
    if any(a in ("-h", "--help", "--helpfull") for a in argv[1:]):
        print(usage)
        raise SystemExit(0)
    _refuse_repeats(argv[1:])
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "experiment", flag_values=values, sys_argv=list(argv))
    flags.DEFINE_string("workdir", "", "where the run goes", flag_values=values)
    for name, meaning in strings.items():
        flags.DEFINE_string(name, "", meaning, flag_values=values)
    try:
        rest = values(list(argv))
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError, ImportError) as error:
        raise InputError(_one_line(error)) from None
    if len(rest) > 1:
        raise InputError(f"{rest[1]!r}: not a flag (flags start with --); {usage}")
    for name in required:
        if not getattr(values, name):
            raise InputError(f"--{name} is missing; {usage}")
    path = values["config"].config_filename if hasattr(values["config"], "config_filename") else ""
    config = resolve(values.config)
    values_dict = {name: getattr(values, name) for name in ("workdir", *strings)}
    return config, _Values(Path(str(path)), **values_dict)


class _Values:
    """Flag values by name; the default workdir is checkpoints/X for configs/X.py."""

    def __init__(self, config_path: Path, **values: str):
        self.__dict__.update(values)
        self.config_path = config_path
        self.workdir = Path(os.path.expanduser(values["workdir"] or f"checkpoints/{config_path.stem}")).absolute()


def _refuse_repeats(words: Sequence[str]) -> None:
    names = [w.split("=")[0] for w in words if w.startswith("--")]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name}: given {names.count(name)} times; give it once")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if not isinstance(error, SyntaxError) else f"{error.filename}:{error.lineno}: {error.msg}"
