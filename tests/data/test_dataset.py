"""Loading problems: every source, and every kind of wrong row with the line that it gets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_ppo.data import dataset
from jax_ppo.rewards import gsm8k
from jax_ppo.types import InputError, Problem

GOOD = {"question": "What is 1+1?", "answer": "1+1=2\n#### 2"}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def refusal(path, split="train", **options) -> str:
    """The message of the refusal, which is always one line."""
    with pytest.raises(InputError) as error:
        dataset.load(str(path), split, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


# Sources


def test_real_problems_all_load(shared):
    train, test = (dataset.load(str(shared / "gsm8k"), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0].question.startswith("Natalia sold clips to 48 of her friends")
    assert train[0].answer == "72"
    assert train[0].solution.endswith("in April and May.\n#### 72")
    assert test[0].answer == "18"
    # Facts about the published data: commas in the gold text, which the answer no longer has, and negative answers.
    for problems, commas, negative in ((train, 79, 3), (test, 14, 2)):
        assert sum("," in p.solution.split("####")[1] for p in problems) == commas
        assert sum(int(p.answer) < 0 for p in problems) == negative
        assert all(gsm8k.score(p.solution, p.answer) == 1.0 for p in problems)
    assert sum(p.answer == "0" for p in train) == 1


def test_one_file_is_every_split(shared):
    file = str(shared / "gsm8k" / "test.jsonl")
    assert dataset.load(file, "train") == dataset.load(file, "test") == dataset.load(str(shared / "gsm8k"), "test")


def test_builtin():
    train, test = (dataset.load("builtin", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (20000, 500)
    assert dataset.load("builtin", "train", limit=5) == train[:5]
    assert dataset.load("builtin", "test", limit=900) == test
    assert "no split 'dev'; there are train, test" in refusal("builtin", "dev")


def test_limit_keeps_the_first_but_checks_all(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", *[{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)])
    assert [p.answer for p in dataset.load(file, "train", limit=2)] == ["0", "1"]
    assert len(dataset.load(file, "train", limit=9)) == 5
    jsonl(tmp_path / "a.jsonl", GOOD, {"question": "q"})
    assert f"{file}:2" in refusal(file, limit=1)


@pytest.mark.parametrize("layout", ["{}.parquet", "{}-00000-of-00001.parquet", "main/{}-00000-of-00001.parquet"])
def test_parquet_as_in_snapshots_of_the_hub(tmp_path, layout):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    for split, answer in (("train", "#### 1"), ("test", "#### 2")):
        file = tmp_path / layout.format(split)
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(table({"question": ["q", "r"], "answer": [answer, answer]}), file)
    assert dataset.load(str(tmp_path), "train") == [Problem("q", "1", "#### 1"), Problem("r", "1", "#### 1")]
    assert dataset.load(str(tmp_path), "test")[0].answer == "2"
    assert dataset.load(str(tmp_path / layout.format("test")), "train")[0].answer == "2"


def test_parquet_shards_in_order_and_complete(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    for shard in (1, 0):
        rows = table({"question": ["q"], "answer": [f"#### {shard}"]})
        parquet.write_table(rows, tmp_path / f"train-0000{shard}-of-00002.parquet")
    assert [p.answer for p in dataset.load(str(tmp_path), "train")] == ["0", "1"]
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    assert "1 of 2 files" in refusal(tmp_path)


def test_parquet_rows_are_checked_too(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    file = tmp_path / "train.parquet"
    parquet.write_table(table({"question": ["q", "r"], "answer": ["#### 1", None]}), file)
    assert refusal(tmp_path) == f'{file}: row 2: "answer" must be text, is null'
    file.write_bytes(b"PAR1 and then nothing")
    assert refusal(tmp_path).startswith(f"{file}: not Parquet: ")


# Paths


@pytest.mark.parametrize("path", ["/no/such", "./no/such", "../no/such", "~/no/such", "no/such.jsonl", "owner/name.parquet"])
def test_what_looks_like_a_path_is_never_looked_up(monkeypatch, path):
    monkeypatch.setattr(dataset, "_hub", lambda *_: pytest.fail("asked the hub"))
    assert refusal(path).endswith("no such file or directory")


def test_an_existing_relative_directory_is_local(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    jsonl(tmp_path / "owner" / "name" / "train.jsonl", GOOD)
    assert len(dataset.load("owner/name", "train")) == 1


@pytest.mark.parametrize("path", ["bultin", "", "a/b/c", "data set/x", "/"])
def test_what_is_neither_path_nor_hub_id(path):
    assert "hub id" in refusal(path) or "no train split" in refusal(path)


def test_directory_without_the_split(tmp_path):
    jsonl(tmp_path / "train.jsonl", GOOD)
    message = refusal(tmp_path, "test")
    assert message.startswith(f"{tmp_path}: no test split; needs test.jsonl or test*.parquet")
    assert message.endswith("holds train.jsonl")


def test_unknown_ending(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("question,answer\n")
    assert refusal(file) == f"{file}: must be a directory or end in .jsonl or .parquet"


@pytest.mark.parametrize("content", ["", "\n", "\ufeff\r\n\r\n"])
def test_empty_file(tmp_path, content):
    file = tmp_path / "a.jsonl"
    file.write_text(content, newline="")
    assert refusal(file) == f"{file}: no rows in its train split; needs at least one problem"


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The library, offline and with an empty cache."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


def test_offline_hub_is_one_line_that_says_what_to_do(datasets, capfd):
    message = refusal("openai/gsm8k")
    assert message.startswith("openai/gsm8k: cannot be loaded: the hub cannot be reached")
    assert message.endswith("--config.data.path=DIR_OR_JSONL")
    assert capfd.readouterr() == ("", "")


def test_hub_rows_are_checked_like_any_other(datasets, monkeypatch):
    rows = [{"question": "q", "answer": "#### 1"}, {"question": "r", "answer": "none"}]
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((args, options)) or rows)
    assert refusal("openai/gsm8k", "test").startswith('openai/gsm8k (test): row 2: "answer" must end in "#### N"')
    del rows[1]
    assert dataset.load("owner/name", "train") == [Problem("q", "1", "#### 1")]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("owner/name", None), {"split": "train"})]


def test_a_dataset_that_the_hub_does_not_have(datasets, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    missing = hub.errors.RepositoryNotFoundError.__new__(hub.errors.RepositoryNotFoundError)

    def dataset_info(*args, **options):
        raise missing

    monkeypatch.setattr(hub.HfApi, "dataset_info", dataset_info)
    assert refusal("owner/name").startswith("owner/name: no such directory, and none on the hub that can be read; give a local")


def test_unreachable_hub_fails_at_once_and_quietly(tmp_path):
    # A port that nobody listens on. Left alone, `datasets` would retry for half a minute, with a page of warnings.
    code = "from jax_ppo.data import dataset; dataset.load('openai/gsm8k', 'train')"
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, timeout=120)
    assert result.stdout == ""
    assert result.stderr.startswith("Traceback")  # the exception is the first thing it says, and
    assert "InputError: openai/gsm8k: cannot be loaded: the hub cannot be reached (ConnectError" in result.stderr.splitlines()[-1]
    assert "Retry" not in result.stderr


def test_names_for_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dataset.name("builtin") == "builtin"
    assert dataset.name("openai/gsm8k") == "openai/gsm8k"
    assert dataset.name("/data/gsm8k/") == "gsm8k"
    assert dataset.name("/data/v1.5") == "v1.5"
    assert dataset.name("some/where/hard.jsonl") == "hard"
    assert dataset.name(".") == tmp_path.name


# Rows


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "answer": "#### 1"}, 'no key "question"; the keys found are prompt, answer'),
        ({"question": "q"}, 'no key "answer"; the keys found are question'),
        ({}, 'no key "question"; the keys found are none'),
        ({"question": "q", "answer": None}, '"answer" must be text, is null'),
        ({"question": "q", "answer": 42}, '"answer" must be text, is 42'),
        ({"question": "q", "answer": ["#### 42"]}, '"answer" must be text, is ["#### 42"]'),
        ({"question": {"text": "q"}, "answer": "#### 1"}, '"question" must be text, is {"text": "q"}'),
        ({"question": " \n", "answer": "#### 1"}, '"question" must be text, is empty'),
        ({"question": "q", "answer": ""}, '"answer" must be text, is empty'),
        (None, 'must be an object with "question" and "answer", is null'),
        ([1, 2], 'must be an object with "question" and "answer", is [1, 2]'),
        ({"question": "half \ud83d", "answer": "#### 1"}, '"question" holds half of a surrogate pair, which is no character'),
    ],
)
def test_wrong_rows_name_line_and_key(tmp_path, row, said):
    file = jsonl(tmp_path / "a.jsonl", GOOD, row, GOOD)
    assert refusal(file) == f"{file}:2: {said}"


@pytest.mark.parametrize("answer", ["42", "The answer is 42.", "#### ", "####abc", "#### 1\n#### 2"])
def test_answers_without_a_gold_number(tmp_path, answer):
    file = jsonl(tmp_path / "a.jsonl", GOOD, GOOD, {"question": "q", "answer": answer})
    assert refusal(file).startswith(f'{file}:3: "answer" must end in "#### N": ')


def test_other_problems_of_the_builtin_task():
    fresh, usual = dataset.load("builtin:7", "test"), dataset.load("builtin", "test")
    assert len(fresh) == len(usual) == 500
    assert len({p.question for p in fresh} & {p.question for p in usual}) < 50
    assert dataset.load("builtin:0", "test") == usual
    assert dataset.name("builtin:7") == "builtin:7"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"question": "q", "ans', "not JSON: Unterminated string starting at column 19"),
        (b'{"question": "q"} x', "not JSON: Extra data at column 19"),
        (b'{"question": "q", "answer": "#### 1", "question": "r"}', 'not JSON: key "question" occurs twice'),
        (b'{"question": "q", "answer": "#### 1", "weight": NaN}', "not JSON: NaN is no JSON value"),
        (b'{"question": "q", "answer": "#### 1", "weight": -Infinity}', "not JSON: -Infinity is no JSON value"),
        (b'{"question": "caf\xe9", "answer": "#### 1"}', "not UTF-8 at byte 18 of the line"),
        (b"[" * 100000, "not JSON: "),
        (b"", "not JSON: Expecting value at column 1"),
    ],
)
def test_broken_lines_are_named(tmp_path, line, said):
    file = tmp_path / "a.jsonl"
    good = json.dumps(GOOD).encode()
    file.write_bytes(b"\n".join([good, good, line, good]))
    assert refusal(file).startswith(f"{file}:3: {said}")


def test_mark_carriage_returns_and_blank_end_are_accepted(tmp_path):
    file = tmp_path / "a.jsonl"
    line = json.dumps({"question": "q\u2028r \u0085", "answer": "#### 1"}, ensure_ascii=False).encode()
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n\r\n  \n")
    assert dataset.load(str(file), "train") == [Problem("q\u2028r \u0085", "1", "#### 1")] * 2


def test_unreadable_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.mkdir()  # a directory in the place of a file
    (tmp_path / "train.jsonl").symlink_to(file)
    assert "cannot be read: IsADirectoryError" in refusal(tmp_path)


# Order


def stream(count, batch, iterations, seed=0):
    return np.concatenate([dataset.batch_indices(count, batch, i, seed) for i in range(iterations)])


def test_every_epoch_holds_every_problem_once():
    indices = stream(count=7, batch=4, iterations=7)
    assert indices.shape == (28,)
    epochs = indices.reshape(4, 7)
    assert (np.sort(epochs, axis=1) == np.arange(7)).all()
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 20, 60])
def test_the_stream_does_not_depend_on_the_batch(batch):
    one_by_one = stream(count=7, batch=1, iterations=120)
    np.testing.assert_array_equal(stream(7, batch, 120 // batch), one_by_one[: batch * (120 // batch)])


def test_a_batch_is_a_function_of_its_number():
    later = dataset.batch_indices(7473, 256, 1000, seed=1)
    assert later.shape == (256,)
    assert later.dtype == np.int64
    dataset.batch_indices(7473, 256, 3, seed=1)
    np.testing.assert_array_equal(dataset.batch_indices(7473, 256, 1000, seed=1), later)
    assert (dataset.batch_indices(7473, 256, 1000, seed=2) != later).any()
    assert (dataset.batch_indices(7473, 256, 1001, seed=1) != later).any()


def test_one_problem_is_enough():
    np.testing.assert_array_equal(dataset.batch_indices(1, 4, 5, seed=0), [0, 0, 0, 0])
