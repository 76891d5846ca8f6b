"""Tests of walks over folders."""

from pathlib import Path

from clipkit.samples.folders import files_below, images_below


def test_vanished_folder_is_an_item_with_a_cause(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    (tmp_path / "b").mkdir()
    walk = files_below(tmp_path)
    assert next(walk) == (tmp_path / "a.jpg", "")
    (tmp_path / "b").rmdir()
    assert list(walk) == [(tmp_path / "b", "cannot read folder: No such file or directory")]


def test_links_that_lead_to_each_other_end(tmp_path: Path) -> None:
    """One folder links to another outside, which links back to the folder above the first."""
    inside, outside = tmp_path / "above" / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        (folder / "x.txt").touch()
    (inside / "out").symlink_to(outside)
    (outside / "back").symlink_to(inside.parent)
    assert list(files_below(inside)) == [
        (inside / "out" / "back", "link to a folder that contains it"),
        (inside / "out" / "x.txt", ""),
        (inside / "x.txt", ""),
    ]


def test_hidden_and_system_folders_are_skipped(tmp_path: Path) -> None:
    for name in (".cache/a.jpg", "@eaDir/b.jpg", "c/.d.jpg", "c/e.JPG", "c/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(images_below(tmp_path)) == [(tmp_path / "c/e.JPG", "")]
    assert [path.name for path, _ in files_below(tmp_path)] == ["e.JPG", "f.txt"]


def test_folders_that_link_to_each_other_are_read_in_time(tmp_path: Path) -> None:
    """Twelve folders, each with links to all others, have more than 10^8 paths without a repeated folder."""
    names = [f"{number:02d}" for number in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").touch()
        for other in names:
            if other != name:
                (tmp_path / name / f"to{other}").symlink_to(tmp_path / other)
    found = [path for path, cause in files_below(tmp_path) if not cause]
    assert {path.relative_to(tmp_path).parts[0] for path in found} == {*names}
    assert 12 * 12 <= len(found) <= 2 * 12 * 12


def test_links_that_lead_nowhere_are_files(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.txt"):
        (tmp_path / name).symlink_to(name)  # to itself
    (tmp_path / "c.jpg").touch()
    assert list(images_below(tmp_path)) == [(tmp_path / "a.jpg", ""), (tmp_path / "c.jpg", "")]
