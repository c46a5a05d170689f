"""The rewritten repository is the one that would have been, had the key never been there."""

import subprocess
from pathlib import Path

KEY, INSTEAD = "AKIAIOSFODNN7EXAMPLE", "X" * 20
BILLING = Path("/app/billing")


def git(folder: Path, *words: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


def test_objects_have_no_key() -> None:
    assert KEY not in git(BILLING, "cat-file", "--batch-all-objects", "--batch", "--buffer")
    assert "ACCESS_KEY" in git(BILLING, "cat-file", "--batch-all-objects", "--batch", "--buffer")


def test_branches_and_tags_are_as_made_without_the_key(tmp_path: Path) -> None:
    script = Path(__file__).parent / "make_history.sh"
    subprocess.run(["bash", str(script), str(tmp_path / "expected"), INSTEAD], check=True)
    assert git(BILLING, "for-each-ref").splitlines() == git(tmp_path / "expected", "for-each-ref").splitlines()


def test_working_tree_is_main() -> None:
    assert git(BILLING, "symbolic-ref", "HEAD") == "refs/heads/main\n"
    assert git(BILLING, "status", "--porcelain") == ""


def test_repository_is_sound() -> None:
    subprocess.run(["git", "-C", str(BILLING), "fsck", "--full", "--strict"], check=True)
