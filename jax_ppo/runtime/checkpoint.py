"""Checkpoints: one atomic orbax step with both train states and everything else that a run needs to continue."""

import json
import logging
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_ppo.runtime import distributed
from jax_ppo.types import InputError, Params, RunError, TrainState

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of a run, in WORKDIR/checkpoints.

    The newest are kept for continuing and, beside them, those with the best held-out accuracy, whichever process saved them. A
    checkpoint without a finite score is never among the best. Only the one process that trains may open this; readers call
    `restore_params`; of several processes, all of them open it and save together.
    """

    def __init__(self, workdir: Path, *, keep_last: int, keep_best: int):
        """Opens the directory, which is made if it is missing, and removes what an earlier process left half written."""
        _quiet()
        self._keep_last, self._keep_best = keep_last, keep_best
        self._manager = ocp.CheckpointManager(
            (workdir / FOLDER).absolute(),
            options=ocp.CheckpointManagerOptions(preservation_policy=self, cleanup_tmp_directories=True),
            item_names=("actor", "critic", "rest"),
        )
        self._scores = {step: self._read_score(step) for step in self.steps()}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which checkpoints stay; orbax asks at every save."""
        steps = [c.step for c in checkpoints]
        scored = sorted((self._scores[step], step) for step in steps if self._scores[step] is not None)
        best = [step for _, step in scored[len(scored) - min(self._keep_best, len(scored)) :]]
        return [step in best or step in steps[-self._keep_last :] for step in steps]

    def save(
        self, iteration: int, actor: TrainState, critic: TrainState | None, rest: dict[str, Any], score: float | None
    ) -> None:
        """Starts to save; returns once the arrays are copied to the host.

        Args:
          iteration: iterations done; names the checkpoint.
          actor, critic: the train states; no critic where none is trained.
          rest:      plain JSON values.
          score:     held-out accuracy, or None.

        Raises:
          RunError: if this save or the one before it failed, or if a checkpoint as new as this one exists.
        """
        self.wait()
        if iteration <= max(self.steps(), default=-1):
            raise RunError(f"checkpoint {iteration}: {self._manager.directory} already holds {self.steps()}")
        self._scores[iteration] = score = score if score is not None and math.isfinite(score) else None
        args = ocp.args.Composite(
            **{name: ocp.args.StandardSave(state) for name, state in _networks(actor, critic).items()},
            rest=ocp.args.JsonSave({"rest": rest, "score": score}),
        )
        try:
            started = self._manager.save(iteration, args=args, force=True)
        except Exception as error:  # a full disk can fail in any layer below
            raise RunError(f"saving checkpoint {iteration} failed: {_line(error)}") from error
        if not started:
            raise RunError(f"checkpoint {iteration}: orbax did not save it")

    def check(self) -> None:
        """Raises what a save that is over has died of; does not wait for one that goes on.

        Raises:
          RunError: if a save failed.
        """
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
          RunError: if a save failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the writing thread died of
            raise RunError(f"saving checkpoint {max(self._scores)} failed: {_line(error)}") from error

    def steps(self) -> list[int]:
        """The checkpoints, oldest first; one that is being saved counts."""
        return sorted(self._manager.all_steps())

    def discard_after(self, iteration: int) -> None:
        """Deletes broken checkpoints behind the one a run continues from, so that they can be saved again."""
        for step in [s for s in self.steps() if s > iteration]:
            self._manager.delete(step)

    def close(self) -> None:
        """Waits and closes.

        Raises:
          RunError: if a save failed.
        """
        self.wait()
        self._manager.close()

    def _read_score(self, step: int) -> float | None:
        try:
            score: float | None = _read_rest(Path(self._manager.directory) / str(step))["score"]
        except (OSError, ValueError, LookupError, TypeError):  # `restore` will say what is wrong with it
            return None
        return score


def restore(
    workdir: Path, actor: TrainState, critic: TrainState | None, *, iteration: int | None = None
) -> tuple[int, TrainState, TrainState | None, dict[str, Any], list[str]]:
    """Reads the newest checkpoint that is whole; nothing is changed on disk.

    Of several processes each reads what its devices hold, and a checkpoint is whole if it is for all of them.

    Args:
      workdir: of the run.
      actor, critic: trees of `jax.ShapeDtypeStruct` with the shardings to restore onto; no critic where none was trained.
      iteration: reads this checkpoint and no other.

    Returns:
      (iteration, actor, critic, rest, skipped): `skipped` says which newer checkpoints are broken, and why.

    Raises:
      RunError: if there is none, or every one is broken.
    """
    _quiet()
    folder, skipped = (workdir / FOLDER).absolute(), list[str]()
    for step in reversed(saved_steps(workdir) if iteration is None else [iteration]):
        found, why = None, "another process cannot read it"
        try:
            networks = {name: _read_state(folder / str(step) / name, s) for name, s in _networks(actor, critic).items()}
            found = networks["actor"], networks.get("critic"), _read_rest(folder / str(step))["rest"]
        except Exception as error:  # a broken file can fail in any layer below
            why = _line(error)
        if not distributed.largest(int(found is None)) and found:
            return step, *found, skipped
        skipped.append(f"checkpoint {step} is broken: {why}")
    raise RunError(f"{folder}: no checkpoint can be read: {'; '.join(skipped)}")


def saved_steps(workdir: Path) -> list[int]:
    """The iterations of the checkpoints of a run, from the oldest; whole or not."""
    return sorted(int(p.name) for p in (workdir / FOLDER).glob("*") if p.name.isdigit())


def locate(path: Path) -> tuple[Path, int | None]:
    """What a path to a checkpoint stands for.

    Args:
      path: WORKDIR, or WORKDIR/checkpoints/N for a certain checkpoint.

    Returns:
      (workdir, iteration), absolute; the iteration is None for the newest checkpoint.
    """
    path = path.expanduser().absolute()
    # A run may be called "7", and lie in the folder "checkpoints" that runs go to by default.
    if path.parent.name == FOLDER and path.name.isdigit() and not (path / FOLDER).is_dir():
        return path.parents[1], int(path.name)
    return path, None


def save_params(workdir: Path, params: Params, item: str) -> None:
    """Writes a checkpoint 0 that holds parameters and nothing else, for `restore_params`.

    Args:
      workdir: must not have checkpoints.
      params:  of one network.
      item:    "actor" or "critic".

    Raises:
      RunError: if saving fails.
    """
    _quiet()
    try:
        ocp.PyTreeCheckpointer().save((workdir / FOLDER / "0" / item).absolute(), {"params": params})
    except (OSError, ValueError) as error:
        raise RunError(f"saving checkpoint 0 failed: {_line(error)}") from error


def restore_params(
    workdir: Path, params: Params, *, item: str = "actor", iteration: int | None = None, cast: bool = True
) -> tuple[int, Params, list[str]]:
    """The parameters of one network of the newest checkpoint that is whole; nothing else is read, and nothing is changed on disk.

    Args:
      workdir: of a run, which may be going on.
      params:  tree of `jax.ShapeDtypeStruct` with shardings.
      item:    "actor" or "critic".
      iteration: reads this checkpoint and no other.
      cast:    to the dtypes of `params`; otherwise each array keeps the dtype it was saved in.

    Returns:
      (iteration, params, skipped): `skipped` says which newer checkpoints are broken, and why.

    Raises:
      InputError: if there is no checkpoint that can be read.
    """
    _quiet()
    folder = (workdir / FOLDER).absolute()
    skipped: list[str] = []
    steps = saved_steps(workdir)
    if iteration is not None and iteration not in steps:
        raise InputError(f"{folder}: no checkpoint {iteration}; there are {', '.join(map(str, steps)) or 'none'}")
    for step in reversed(steps) if iteration is None else [iteration]:
        try:
            return step, _read(folder / str(step), item, params, cast=cast), skipped
        except Exception as error:  # a broken file can fail in any layer below
            there = [name for name in ("actor", "critic") if (folder / str(step) / name).is_dir()]
            why = _line(error) if item in there or not there else f"it has no {item}, only a {there[0]}"
            skipped.append(f"checkpoint {step} is broken: {why}")
    raise InputError(f"{folder}: no checkpoint can be read: {'; '.join(skipped)}" if skipped else f"{folder}: no checkpoint yet")


def _read_state(item: Path, state: TrainState) -> TrainState:
    """One network of a checkpoint, read by this process for its own devices, without waiting for others: they may fail alone."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}")
    with ocp.Checkpointer(ocp.StandardCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone) as reader:
        found: TrainState = reader.restore(item, args=ocp.args.StandardRestore(state))
    return found


def _read_rest(step: Path) -> dict[str, Any]:
    """What a checkpoint holds beside the networks: "rest" and "score"."""
    found: dict[str, Any] = json.loads((step / "rest" / "metadata").read_text(encoding="utf-8"))
    return found


def _read(step: Path, item: str, params: Params, *, cast: bool) -> Params:
    """The parameters of one network of a checkpoint."""
    checkpointer = ocp.PyTreeCheckpointer()

    def read(item: str, params: Params, stored: Params) -> Params:
        wanted = {"params": params if cast else _matching(params, stored)}
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
        found: Params = checkpointer.restore(step / item, args=args)["params"]
        return found

    stored = checkpointer.metadata(step / item).item_metadata.tree["params"]
    if item == "critic" and "model" in params and "model" not in stored:
        # A head on the actor: its trunk is in the actor's item.
        trunk = checkpointer.metadata(step / "actor").item_metadata.tree["params"]["model"]
        _matching(params, {"model": trunk, **stored})
        return {
            **read("actor", {"model": params["model"]}, {"model": trunk}),
            **read("critic", {"score": params["score"]}, stored),
        }
    _matching(params, stored)
    return read(item, params, stored)


def _matching(params: Params, stored: Any) -> Params:
    """`params` in the dtypes that are stored. Orbax would drop what is not asked for, and not name what has another shape."""
    named = lambda tree: {  # noqa: E731
        jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    asked, found = named(params), named(stored)
    for name in sorted(asked.keys() | found.keys()):
        there, wanted = (tuple(x[name].shape) if name in x else "none" for x in (found, asked))
        if there != wanted:
            raise InputError(f"parameter {name}: {there} in the checkpoint, {wanted} in the model")
    return jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, s.dtype, sharding=p.sharding), params, stored)


def _networks(actor: Any, critic: Any) -> dict[str, Any]:
    """The networks there are, by the name of their item."""
    return {name: state for name, state in (("actor", actor), ("critic", critic)) if state is not None}


def abstract(state: Any, shardings: Any) -> Any:
    """Shapes and shardings of a train state, to restore onto."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _quiet() -> None:
    # orbax reports every file at level INFO, and what it raises once more with its whole stack at level ERROR. The first write
    # that fails is raised; those behind it are dropped before they begin, of which Python warns.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)


def _line(error: Exception) -> str:
    """The first line of an error, without the specification that tensorstore appends; a long one keeps its ends: what and why."""
    lines = str(error.args[0] if error.args else error).splitlines() or [type(error).__name__]
    text = re.sub(r"( \[tensorstore_spec=|\. See full TensorStore).*", "", lines[0])
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-150:]}"
