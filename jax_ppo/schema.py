"""Keys of a configuration: what each is called, its default, its meaning, what it takes, for any tree of frozen dataclasses.

A key is named by its path, "section.key" or "section.part.key".
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import field
from typing import Any, NamedTuple

import ml_collections

from jax_ppo.types import InputError


class Rule(NamedTuple):
    """What values a key takes: a test, and the same in words that continue "must be a number, ..."."""

    test: Callable[[Any], bool]
    words: str


def at_least(low: float) -> Rule:
    """low <= value."""
    return Rule(lambda v: v >= low, f"at least {low}")


def one_of(*choices: str) -> Rule:
    """One of a few words."""
    return Rule(lambda v: v in choices, f"one of {', '.join(choices)}")


KINDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}

POSITIVE, UNSIGNED = at_least(1), at_least(0)
ABOVE_ZERO = Rule(lambda v: v > 0, "above 0")
FRACTION = Rule(lambda v: 0 <= v <= 1, "between 0 and 1")
DECAY = Rule(lambda v: 0 <= v < 1, "at least 0 and below 1")
INSIDE = Rule(lambda v: 0 < v < 1, "between 0 and 1, both excluded")
DUAL = Rule(lambda v: v == 0 or v > 1, "0 or above 1")
FILLED = Rule(bool, "not empty")
DEVICES = Rule(lambda v: v >= 1 or v == -1, "at least 1, or -1 (the rest of the devices)")


def key(default: Any, meaning: str, rule: Rule | None = None) -> Any:
    """Declares a key.

    Args:
      default: its value where a config says nothing; its type is the type of the key.
      meaning: for the reader of --help.
      rule:    what is allowed, beside the type and being finite.
    """
    return field(default=default, metadata={"meaning": meaning, "rule": rule})


class Key(NamedTuple):
    """What is known of a key: its default, its meaning, and the words for its type and for what else it must be, or ""."""

    default: Any
    meaning: str
    kind: str
    rule: str

    @property
    def allowed(self) -> str:
        """Type and rule as one phrase."""
        return self.rule if self.rule.startswith("one of") else ", ".join(filter(None, (self.kind, self.rule)))


def flat(tree: Mapping[str, Any], stop: Container[str] = (), above: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value of everything in nested sections; what `stop` names is a value even where it looks like a section."""
    for last, value in tree.items():
        name = f"{above}{last}"
        if isinstance(value, Mapping | ml_collections.ConfigDict) and name not in stop:
            yield from flat(value, stop, f"{name}.")
        else:
            yield name, value


def read(config: Any, name: str) -> Any:
    """The value of a key, or a section."""
    return functools.reduce(getattr, name.split("."), config)


def sections(config: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Name and dataclass of every section, each behind the one around it."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield f"{above}{f.name}", value
            yield from sections(value, f"{above}{f.name}.")


def keys(defaults: Any) -> dict[str, Key]:
    """Every key, by its name."""
    found = {}
    for section, values in sections(defaults):
        for f in dataclasses.fields(values):
            default, rule = getattr(values, f.name), f.metadata.get("rule")
            if not dataclasses.is_dataclass(default):
                found[f"{section}.{f.name}"] = Key(
                    default, f.metadata["meaning"], KINDS[type(default)], rule.words if rule else ""
                )
    return found


def check_key(known: Mapping[str, Key], name: str, value: Any) -> None:
    """Refuses what is no key.

    Args:
      known: the keys there are.
      name:  as somebody wrote it.
      value: what it was set to, for the message.

    Raises:
      InputError: naming the key that was probably meant, or those there are.
    """
    if name in known:
        return
    around = list(dict.fromkeys(k.rpartition(".")[0] for k in known))
    inside = [k for k in known if k.startswith(f"{name}.")]
    if inside:
        raise InputError(f"config.{name}={value}: is a section; set its keys one by one: {', '.join(inside)}")
    section, _, last = name.rpartition(".")
    beside = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
    elsewhere = [k for k in known if k.endswith(f".{last}")]
    if near := difflib.get_close_matches(last if beside else name, beside or [*around, *known], n=1) or elsewhere:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"{section} has {', '.join(beside)}" if beside else f"the sections are {', '.join(around)}"
    raise InputError(f"config.{name}: no such key; {hint}")


def wrong(known: Mapping[str, Key], name: str, value: Any) -> InputError:
    """The error about a value that a key does not take."""
    return InputError(f"config.{name}={value}: must be {known[name].allowed}")


def complete(defaults: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `raw`, checked for their types, and the defaults of everything else, as nested plain values.

    Args:
      defaults: the tree of dataclasses.
      raw:      nested sections and keys, a ConfigDict for instance.

    Raises:
      InputError: for a key that does not exist, or a value of another type than its default.
    """
    known, values = keys(defaults), dataclasses.asdict(defaults)
    for name, value in flat(raw, known):
        check_key(known, name, value)
        section, _, last = name.rpartition(".")
        functools.reduce(dict.__getitem__, section.split("."), values)[last] = _typed(known, name, value)
    return values


def build(defaults: Any, values: Mapping[str, Any]) -> Any:
    """The tree of dataclasses with other values, each within the rule of its key.

    Args:
      defaults: such a tree.
      values:   from `complete`.

    Raises:
      InputError: naming the key, its value, and what is allowed.
    """
    known = keys(defaults)

    def make(here: Any, values: Mapping[str, Any], above: str) -> Any:
        inside = {}
        for f in dataclasses.fields(here):
            name, value, rule = f"{above}{f.name}", values[f.name], f.metadata.get("rule")
            if dataclasses.is_dataclass(inner := getattr(here, f.name)):
                value = make(inner, value, f"{name}.")
            elif (isinstance(value, float) and not math.isfinite(value)) or (rule and not rule.test(value)):
                raise wrong(known, name, value if value != "" else "''")
            inside[f.name] = value
        return type(here)(**inside)

    return make(defaults, values, "")


def _typed(known: Mapping[str, Key], name: str, value: Any) -> Any:
    kind = type(known[name].default)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise wrong(known, name, repr(value))
    return value
