"""Token records on disk: what an update made of each sampled token."""

from pathlib import Path

import numpy as np
import pytest

from agent_rl.errors import DamagedEpisodeError
from agent_rl.store.token_records import (
    TOKEN_RECORDS,
    TokenRecord,
    TokenRecordWriter,
    read_token_records,
    token_records,
)


def record(episode: str, step: int, trajectory: int = 0, advantages: list[float] | None = None) -> TokenRecord:
    logprobs = np.array([-0.5, np.nan, -1e-30], np.float32)
    known = None if advantages is None else np.array(advantages, np.float32)
    return TokenRecord(episode, trajectory, step, known, logprobs)


def test_token_records_return_bit_for_bit(tmp_path: Path) -> None:
    written = [record("a", 0, 0, [0.1, np.nan, -0.0]), record('a b"é', 0), record("a", 1, 1)]
    with TokenRecordWriter(tmp_path) as writer:
        writer.write(written[:2])
        writer.write([])
        writer.write(written[2:])
    for found, wanted in zip(read_token_records(tmp_path), written, strict=True):
        assert (found.episode, found.trajectory, found.step) == (wanted.episode, wanted.trajectory, wanted.step)
        assert found.logprobs.tobytes() == wanted.logprobs.tobytes()
        assert (found.advantages is None) == (wanted.advantages is None)
        if found.advantages is not None and wanted.advantages is not None:
            assert found.advantages.tobytes() == wanted.advantages.tobytes()
    assert [r.step for r in token_records(tmp_path / "episodes.jsonl", "a")] == [0, 1]
    assert len(token_records(tmp_path, 'a b"é')) == 1
    assert token_records(tmp_path, "a b") == [] == token_records(tmp_path / "elsewhere", "a")


def test_token_record_writer_forgets_steps_taken_again(tmp_path: Path) -> None:
    with TokenRecordWriter(tmp_path) as writer:
        for step in range(4):
            writer.write([record(f"odd \\ id {step}", step), record("every", step)])
    with (tmp_path / TOKEN_RECORDS).open("ab") as file:
        file.write(b'{"schema":1,"epi')
    with pytest.warns(UserWarning, match="torn"), TokenRecordWriter(tmp_path) as writer:
        writer.rewind(2)
        writer.write([record("every", 2)])
    assert [r.step for r in token_records(tmp_path, "every")] == [0, 1, 2]
    assert len(list(read_token_records(tmp_path))) == 5


def test_rewinding_keeps_token_records_behind_a_damaged_line(tmp_path: Path) -> None:
    with TokenRecordWriter(tmp_path) as writer:
        for step in range(4):
            writer.write([record("a", step)])
    file = tmp_path / TOKEN_RECORDS
    file.write_bytes(b"damaged" + file.read_bytes()[7:])
    with TokenRecordWriter(tmp_path) as writer:
        writer.rewind(3)
    assert [r.step for r in token_records(tmp_path, "a")] == [1, 2]


def test_token_records_are_not_missing_where_a_line_is_damaged(tmp_path: Path) -> None:
    with TokenRecordWriter(tmp_path) as writer:
        writer.write([record("a", 0), record("b", 0)])
    assert token_records(tmp_path, "c") == []
    file = tmp_path / TOKEN_RECORDS
    file.write_bytes(b"damaged" + file.read_bytes()[7:])
    assert len(token_records(tmp_path, "b")) == 1
    with pytest.raises(DamagedEpisodeError, match=f"{TOKEN_RECORDS}, byte 0: "):
        token_records(tmp_path, "a")


def test_damaged_token_records_name_their_line(tmp_path: Path) -> None:
    with TokenRecordWriter(tmp_path) as writer:
        writer.write([record("a", 0), record("b", 0)])
    file = tmp_path / TOKEN_RECORDS
    file.write_bytes(file.read_bytes().replace(b'"crc32":', b'"crc32":1', 3))
    with pytest.raises(DamagedEpisodeError, match=rf"{TOKEN_RECORDS}, byte [1-9]\d+: .*checksum"):
        token_records(tmp_path, "b")
    file.write_bytes(file.read_bytes().replace(b'"schema":1', b'"schema":9'))
    with pytest.raises(DamagedEpisodeError, match=rf"{TOKEN_RECORDS}, byte 0: "):
        list(read_token_records(tmp_path))
