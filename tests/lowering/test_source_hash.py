"""The hash of sources follows every Python file below a folder."""

from __future__ import annotations

from pathlib import Path

from mpcompile.lowering.source_hash import source_hash


def hashed(root: Path) -> str:
    source_hash.cache_clear()
    return source_hash(root)


def test_hash_follows_contents_names_and_linked_folders(tmp_path: Path) -> None:
    root, linked = tmp_path / "package", tmp_path / "passes"
    root.mkdir()
    linked.mkdir()
    (root / "a.py").write_text("x = 1\n")
    seen = [hashed(root)]
    (root / "a.py").write_text("x = 2\n")
    seen.append(hashed(root))
    (root / "a.py").rename(root / "b.py")
    seen.append(hashed(root))
    (root / "passes").symlink_to(linked)
    (linked / "fold.py").write_text("")
    seen.append(hashed(root))
    (linked / "fold.py").write_text("y = 1\n")
    seen.append(hashed(root))
    assert len(set(seen)) == len(seen)


def test_hash_ignores_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = hashed(tmp_path)
    (tmp_path / "a.pyc").write_text("compiled")
    assert hashed(tmp_path) == before
