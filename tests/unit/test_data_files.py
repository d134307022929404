"""Parquet and Arrow files, and folders as Hugging Face's library writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runtime import config
from runtime.data.files import data_files
from runtime.data.handlers import load_problems
from runtime.data.reading import count_rows, read_rows
from runtime.errors import UserError

ROWS = [{"question": f"{i}+1?", "answer": i + 1, "extra": {"list": [i, None]}} for i in range(3000)]


def save_parquet(path: Path, start: int, end: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS[start:end]), path)
    return path


def save_to_disk(folder: Path, start: int, end: int) -> Path:
    """As `Dataset.save_to_disk` with two shards."""
    folder.mkdir(parents=True)
    middle = (start + end) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (ROWS[start:middle], ROWS[middle:end]), strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def labels(path: Path) -> list[int]:
    return [int(problem.label) for problem in load_problems(str(path), config.Data()).problems]


def test_tables_give_the_rows_that_were_written(tmp_path: Path) -> None:
    parquet = save_parquet(tmp_path / "a.parquet", 0, 3000)
    assert list(read_rows(parquet, "k")) == list(enumerate(ROWS, 1))
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    assert list(read_rows(tmp_path / "a.arrow", "k")) == list(enumerate(ROWS, 1))
    assert count_rows(parquet, "k") == count_rows(tmp_path / "a.arrow", "k") == 3000


def test_rows_of_json_are_counted_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    assert count_rows(tmp_path / "a.jsonl", "k") == count_rows(tmp_path / "a.json", "k") == 3000


def test_a_saved_dataset_is_read_shard_by_shard(tmp_path: Path) -> None:
    found = load_problems(str(save_to_disk(tmp_path / "sums", 0, 20)), config.Data()).problems
    assert [problem.label for problem in found] == [str(i + 1) for i in range(20)]
    assert [problem.id for problem in found] == [f"{tmp_path.name}/sums:{i + 1}" for i in range(20)]  # unique over shards


def test_of_a_saved_dictionary_the_training_split_is_read(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "sums" / "train", 5, 15)
    save_to_disk(tmp_path / "sums" / "test", 0, 5)
    (tmp_path / "sums" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert labels(tmp_path / "sums") == list(range(6, 16))
    assert labels(tmp_path / "sums" / "test") == list(range(1, 6))
    assert data_files(str(tmp_path / "sums"), "k").source == "sums/train"
    (tmp_path / "sums" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UserError, match=r"^k: .*sums has no split named train \(it has test\); name a file of it$"):
        data_files(str(tmp_path / "sums"), "k")


def test_a_downloaded_repository_keeps_its_files_in_data(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# sums")
    save_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", 10, 20)
    save_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", 0, 10)
    save_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", 20, 30)
    assert labels(tmp_path) == list(range(1, 21))


def test_a_folder_of_files_without_splits_is_read_whole(tmp_path: Path) -> None:
    save_parquet(tmp_path / "b.parquet", 10, 20)
    save_parquet(tmp_path / "a.parquet", 0, 10)
    assert labels(tmp_path) == list(range(1, 21))


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^k: .* holds no \.json, \.jsonl, \.parquet or \.arrow file$"):
        data_files(str(tmp_path), "k")
    save_parquet(tmp_path / "a.parquet", 0, 10)
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"^k: .* holds files of several kinds \(\.jsonl, \.parquet\); name one of them$"):
        data_files(str(tmp_path), "k")
    (tmp_path / "b.jsonl").unlink()
    save_parquet(tmp_path / "train.parquet", 0, 10)
    with pytest.raises(UserError, match=r"^k: .* holds files of splits, and a\.parquet, which names none; name the files$"):
        data_files(str(tmp_path), "k")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"^k: .*state\.json is not what save_to_disk writes: Object missing .*`_data_files`"):
        data_files(str(tmp_path), "k")


def test_a_torn_table_is_one_line(tmp_path: Path) -> None:
    whole = save_parquet(tmp_path / "a.parquet", 0, 100).read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"^k: .*a\.parquet: not a Parquet file: ") as error:
        list(read_rows(tmp_path / "a.parquet", "k"))
    assert "\n" not in str(error.value)
    (tmp_path / "a.arrow").write_bytes(b"\xff\xff\xff\xff" + bytes(100))
    with pytest.raises(UserError, match=r"^k: .*a\.arrow: "):
        list(read_rows(tmp_path / "a.arrow", "k"))
