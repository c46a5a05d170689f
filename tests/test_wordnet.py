"""wordnet-v0 on an excerpt of its corpus in the packages' own formats; tests/adapters has the whole."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.envs import wordnet, wordnet_corpus
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import spec
from agent_rl.policy import Scripted
from agent_rl.rollout import Job, run_episode

NOUNS = """\
  1 This software and database is being provided to you, the LICENSEE, by
00000010 03 n 02 animal 0 beast 0 000 | a living thing that moves
00000020 03 n 01 bird 0 001 @ 00000010 n 0000 | a creature with feathers
00000030 03 n 01 owl 0 001 @ 00000020 n 0000 | hunts by night
00000040 03 n 01 snowy_owl(p) 0 001 @ 00000030 n 0000 | large and white
00000050 15 n 01 Asia 0 001 @i 00000060 n 0000 | the largest continent
00000060 15 n 01 continent 0 000 | a large landmass
00000070 15 n 01 Japan 0 002 @i 00000060 n 0000 #p 00000050 n 0000 | islands
00000080 15 n 01 Tokyo 0 002 @i 00000060 n 0000 #p 00000070 n 0000 | the capital and largest city of Japan; on Honshu
00000090 15 n 01 Ginza 0 002 @i 00000060 n 0000 #p 00000080 n 0000 | a street of shops
00000100 18 n 01 Basho 0 001 @i 00000110 n 0000 | Japanese poet (1644-1694)
00000110 18 n 01 poet 0 000 | a writer of poems
"""
OTHERS = {"verb": "00000010 29 v 01 hoot 0 000 | cry like an owl", "adj": "00000010 00 s 01 wise 0 000 | as an owl"}
WORDS = {
    "00-database-info": "The Collaborative International Dictionary of English, with its sources.",
    "Owl": "Owl \\Owl\\, n. Any species of raptorial birds of the family Strigidae.",
    "Owlet": "Owlet.\nA young owl, or a small one; also a genus of them.",
    "Ow": "Too short.",
}


def number(value: int) -> str:
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return (number(value // 64) if value >= 64 else "") + digits[value % 64]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for kind, text in {"noun": NOUNS, "adv": "", **OTHERS}.items():
        (folder / f"data.{kind}").write_text(text)
    index, data = [], b""
    for word, text in WORDS.items():
        index.append(f"{word}\t{number(len(data))}\t{number(len(text))}")
        data += text.encode()
    index.append(index[1].replace("Owl", "Owls"))  # two words of one passage
    (folder / "gcide.index").write_text("\n".join(index) + "\n")
    (folder / "gcide.dict.dz").write_bytes(gzip.compress(data))
    return folder


@pytest.fixture(scope="module", autouse=True)
def corpus(source: Path, tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_RL_CACHE", str(tmp_path_factory.mktemp("cache")))
        assert wordnet_corpus.build(source, wordnet_corpus.corpus_folder()) == (15, 6)
        yield wordnet_corpus.corpus_folder()


def rows(corpus: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (corpus / name).read_text().splitlines()]


def play(task: ar.Task, *answers: str | ar.Message, **args: int) -> ar.Episode:
    policy = Scripted(lambda env, seed: (answer for answer in answers))
    return asyncio.run(run_episode(Job(spec("wordnet-v0"), task, 0, env_args=args), policy))


def search(query: str) -> ar.Message:
    return ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "search", {"query": query}),))


def test_corpus_has_passages_with_relations(corpus: Path) -> None:
    texts = {row["id"]: row["text"] for row in rows(corpus, "passages.jsonl")}
    assert texts["wn-n00000040"] == "snowy owl (noun): large and white It is a kind of owl."
    assert texts["wn-n00000080"].endswith("It is an instance of continent. It is part of Japan.")
    definitions = [text for id, text in texts.items() if id.startswith("gcide")]
    assert definitions == [" ".join(WORDS[word].split()) for word in ("Owl", "Owlet")] and "wn-a00000010" in texts


def test_questions_need_their_support(corpus: Path) -> None:
    found = {(row["kind"], row["names"][0]): (row["answers"], row["support"]) for row in rows(corpus, "tasks.jsonl")}
    assert found == {
        ("kind of kind", "owl"): (["animal", "beast"], ["wn-n00000030", "wn-n00000020"]),
        ("kind of kind", "snowy owl"): (["bird"], ["wn-n00000040", "wn-n00000030"]),
        ("part of part", "Tokyo"): (["Asia"], ["wn-n00000080", "wn-n00000070"]),
        ("part of part", "Ginza"): (["Japan"], ["wn-n00000090", "wn-n00000080"]),
        ("capital", "Ginza"): (["Japan"], ["wn-n00000090", "wn-n00000080"]),
        ("born", "Basho"): (["1644"], ["wn-n00000100"]),
    }


def test_frequent_answers_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordnet_corpus, "SAME_ANSWER", 2)
    tasks = [{"answers": [answer], "question": f"{n}"} for n, answer in enumerate("aabaab")]
    left = [*wordnet_corpus._without_favourites(tasks)]
    assert sorted(task["answers"][0] for task in left) == ["a", "a", "b", "b"]
    assert left != sorted(left, key=lambda task: task["question"])


def test_oracle_finds_and_answers(corpus: Path) -> None:
    for task in rows(corpus, "tasks.jsonl"):
        episode = asyncio.run(run_episode(Job(spec("wordnet-v0"), task, 0), ar.policy.oracle()))
        assert (episode.value("correct"), episode.value("supported")) == (1.0, 1.0), task


def test_answers_are_any_name_and_support_is_searched_for(corpus: Path) -> None:
    task = next(row for row in rows(corpus, "tasks.jsonl") if row["names"][0] == "owl")
    lucky = play(task, " A Beast.\n")
    assert (lucky.value("correct"), lucky.value("supported")) == (1.0, 0.0)
    assert play(task, search("owl"), "bird").value("correct") == 0.0
    half = play(task, search("snowy"), "animal")
    assert (half.value("correct"), half.value("supported")) == (1.0, 0.0)
    assert half.messages[2].content.startswith("[1] snowy owl (noun): large and white")


def test_searches_return_as_much_as_was_asked_for(corpus: Path) -> None:
    task = next(row for row in rows(corpus, "tasks.jsonl") if row["names"][0] == "owl")
    whole, short = (play(task, search("owl"), "bird", **args).messages[2].content for args in ({}, {"results": 2}))
    assert (whole.count("\n"), short.count("\n")) == (4, 1) and whole.startswith(short)
    cut = play(task, search("owl"), "bird", results=2, characters=12).messages[2].content
    assert [len(line) for line in cut.split("\n")] == [16, 16] and cut.startswith("[1] ") and cut.endswith("…")
    with pytest.raises(ConfigError, match="results=0, characters=5: "):
        spec("wordnet-v0").make(results=0, characters=5)


def test_splits_are_disjoint_and_complete(corpus: Path) -> None:
    asked = [task["question"] for split in ("train", "eval", "dev") for task in wordnet.Questions(split)]
    assert sorted(asked) == sorted(row["question"] for row in rows(corpus, "tasks.jsonl"))


def test_missing_corpus_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="build it by `python -m agent_rl"):
        list(wordnet.Questions("train"))


@pytest.mark.parametrize("missing", ["apt-get", "dpkg-deb", "nothing"])
def test_build_without_debian_says_what_to_do(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    folder = {"apt-get": None, "dpkg-deb": tmp_path, "nothing": tmp_path / "empty"}[missing]
    (tmp_path / "empty").mkdir()
    (tmp_path / "wordnet-base_1_all.deb").touch()
    wanted = "give a folder with the .deb files" if missing == "nothing" else f"{missing} .* fails: .*No such file"
    with pytest.raises(ConfigError, match=wanted):
        wordnet_corpus.build(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_builds_or_explains(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["", str(source)])
    assert wordnet_corpus.main() == 0 and "15 passages and 6 tasks in " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["", str(tmp_path)])
    assert wordnet_corpus.main() == 1 and "has no data.noun" in capsys.readouterr().err
