"""The command line: flags to configuration, and mistakes to one line and an exit code."""

import argparse
import difflib
import inspect
import os
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import ml_collections
from absl import flags
from ml_collections import config_flags

from jax_ppo import config as configuration
from jax_ppo import schema
from jax_ppo.config import Config
from jax_ppo.types import InputError, RunError

INDENT = 30  # where the second column of the help begins


def main(
    argv: Sequence[str],
    job: Callable[[Config, SimpleNamespace], Any],
    *,
    module: str,
    strings: Mapping[str, str] | None = None,
) -> int:
    """Parses the command line and does the job.

    Args:
      argv:    program name, then flags.
      job:     called as job(config, values), see `parse`.
      module:  for the usage line.
      strings: further text flags and what they mean; each must be given.

    Returns:
      0; 2 after one line about a wrong input; 1 after one line about a failure while running; 130 after Ctrl-C. Anything
      unforeseen is raised.
    """
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(argv[1:]):
        sys.stdout.write(help_page(module, strings or {}))
        return 0
    return exit_code(lambda: job(*parse(argv, module=module, strings=strings or {})))


class Parser(argparse.ArgumentParser):
    """A parser for small tools whose errors are one line, like those of everything else here."""

    def error(self, message: str) -> NoReturn:
        """Raises an `InputError` of what is wrong, with the usage."""
        raise InputError(f"{message}; {' '.join(self.format_usage().split())}")


def exit_code(work: Callable[[], Any]) -> int:
    """Does the work; warnings and errors become a line each, as `main` describes."""
    said = set[str]()

    def warn(message: str) -> None:
        # A directory may be read for the check, the actor, the critic and the reference; its peculiarity is news once.
        if message not in said:
            said.add(message)
            _say(f"warning: {message}")

    warnings.showwarning = lambda message, *_: warn(str(message))
    sys.unraisablehook = _unraisable
    try:
        work()
    except InputError as error:
        _say(f"error: {error}")
        return 2
    except RunError as error:
        _say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    return 0


def parse(argv: Sequence[str], *, module: str, strings: Mapping[str, str]) -> tuple[Config, SimpleNamespace]:
    """The resolved configuration, and everything else as attributes of one value: `config_path`, the file of --config; `workdir`,
    absolute, checkpoints/X for configs/X.py where --workdir says nothing; and the further flags.

    A flag is --name=value or --name value. A switch of the configuration may also stand as --config.X.Y or --noconfig.X.Y. The
    order of the flags does not matter.

    Raises:
      InputError: for an unknown or repeated flag, a word that is no flag, a missing flag, a wrong value, or a config file that
        cannot be used.
    """
    given = _words(argv[1:], ("config", "workdir", *strings))
    for name in ("config", *strings):
        if not given.get(name):
            raise InputError(f"--{name} is missing; {usage(module, strings)}")
    path = Path(given["config"]).expanduser()
    raw = load_config(path)
    for name, text in given.items():
        if name.startswith("config."):
            _override(raw, name.removeprefix("config."), text)
    workdir = _usable(Path(given.get("workdir") or f"checkpoints/{path.stem}").expanduser().absolute())
    return configuration.resolve(raw), SimpleNamespace(config_path=path, workdir=workdir, **{n: given[n] for n in strings})


def usage(module: str, strings: Mapping[str, str]) -> str:
    """The line that shows how the program is called."""
    required = "".join(f" --{name}={name.upper()}" for name in strings)
    return f"usage: python -m {module} --config=configs/X.py{required} [--workdir=DIR] [--config.SECTION.KEY=VALUE ...]"


def help_page(module: str, strings: Mapping[str, str]) -> str:
    """What --help prints: usage, flags, and every key with its default, its meaning and what is allowed."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    rows = {
        "--config=FILE": "Python file whose get_config() returns default_config() with changes; see configs/",
        **{f"--{name}={name.upper()}": meaning for name, meaning in strings.items()},
        "--workdir=DIR": "where the run goes; checkpoints/X for configs/X.py unless given",
        "--config.SECTION.KEY=VALUE": "overrides the file; all sections and keys, with their defaults:",
    }
    lines = [usage(module, strings), "", *_table(rows, width)]
    for section, values in schema.sections(Config()):
        rows = {
            f"{name.removeprefix(section + '.')}={_written(key.default)}": f"{key.meaning} [{key.rule}]".removesuffix(" []")
            for name, key in configuration.keys().items()
            if name.rpartition(".")[0] == section
        }
        lines += ["", *textwrap.wrap(f"{section}: {type(values).__doc__}", width), *_table(rows, width)]
    return "\n".join(lines) + "\n"


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Runs get_config() of a Python file.

    Returns:
      Its result, to which the defaults of what it leaves out are added.

    Raises:
      InputError: naming the file and the line where it fails, or the key it should not have set.
    """
    if not path.is_file():
        found = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = f"; {path.parent}/ has {', '.join(found)}" if found else ""
        raise InputError(f"--config={path}: {'is a directory' if path.is_dir() else 'no such file'}{hint}")
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), namespace)  # not imported, which could find an older compiled file
        if not callable(namespace.get("get_config")):
            raise InputError(f"{path}: has no function get_config()")
        result = namespace["get_config"]()
    except InputError:
        raise
    except Exception as error:
        raise InputError(_where(path, error)) from None
    if not isinstance(result, ml_collections.ConfigDict):
        raise InputError(f"{path}: get_config() must return default_config() with changes, not {type(result).__name__}")
    raw = ml_collections.ConfigDict(result)  # a copy that is not frozen, and whose references stay references
    with raw.unlocked():
        _add(raw, schema.complete(Config(), raw))
    return raw


def _add(raw: ml_collections.ConfigDict, values: Mapping[str, Any]) -> None:
    """Adds what is missing."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            raw[name] = raw.get(name, ml_collections.ConfigDict())
            _add(raw[name], value)
        elif name not in raw:
            raw[name] = value


def _words(words: Sequence[str], plain: Sequence[str]) -> dict[str, str]:
    """Flag -> text, from --name=text, --name text, --config.SWITCH and --noconfig.SWITCH."""
    given: dict[str, str] = {}
    known = configuration.keys()
    switches = [f"config.{name}" for name, key in known.items() if isinstance(key.default, bool)]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            hint = f"did you mean --{word.lstrip('-')}?" if "=" in word else "flags are written --name=value"
            raise InputError(f"{word}: not a flag; {hint}")
        name, equals, text = word[2:].partition("=")
        if not equals and name in switches:
            text = "true"
        elif not equals and name.startswith("no") and name[2:] in switches:
            name, text = name[2:], "false"
        elif name not in plain and not name.startswith("config."):
            near = difflib.get_close_matches(name, [*plain, *(f"config.{k}" for k in known)], n=1)
            flag_names = ", ".join([*(f"--{p}" for p in plain), "--config.SECTION.KEY"])
            hint = f"did you mean --{near[0]}?" if near else f"there are {flag_names}"
            raise InputError(f"--{name}: no such flag; {hint}")
        elif not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{word}: has no value; write {word}=VALUE")
            text = rest.pop(0)
        if name in given:
            raise InputError(f"--{name}: given twice, as {given[name]!r} and {text!r}; give it once")
        given[name] = text
    return given


def _override(raw: ml_collections.ConfigDict, name: str, text: str) -> None:
    schema.check_key(configuration.keys(), name, text)
    argv, values = ["", f"--config.{name}={text}"], flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", raw, flag_values=values, sys_argv=argv)
        values(argv)
    except flags.IllegalFlagValueError:
        raise schema.wrong(configuration.keys(), name, text or "''") from None


def _usable(workdir: Path) -> Path:
    """The workdir, once it is sure that it is a directory or can become one."""
    there = next(p for p in (workdir, *workdir.parents) if p.exists())
    if not there.is_dir():
        raise InputError(f"--workdir={workdir}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--workdir={workdir}: {there} cannot be written to")
    return workdir


def _where(path: Path, error: Exception) -> str:
    """file:line: what, for an error of a config file: the innermost line of the file itself."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}:{error.lineno or 1}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}: {what}" if lines else f"{path}: {what}"


def _table(rows: Mapping[str, str], width: int) -> list[str]:
    """Two columns; a left cell that is too wide has its line for itself."""
    lines = []
    for left, right in rows.items():
        text = textwrap.wrap(right, width, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT, break_on_hyphens=False)
        if len(left) + 4 > INDENT:
            lines += [f"  {left}", *text]
        else:
            lines += [f"  {left}".ljust(INDENT) + text[0].lstrip(), *text[1:]]
    return lines


def _written(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default) or "''"


def _unraisable(found: Any) -> None:
    """Leaves out what orbax's event loops say behind an error that was raised already."""
    if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)


def _say(text: str) -> None:
    """One line on stderr, whatever the text: it may come from a library, with line ends of its own."""
    sys.stderr.write(" ".join(part.strip() for part in text.splitlines() if part.strip()) + "\n")
    sys.stderr.flush()
