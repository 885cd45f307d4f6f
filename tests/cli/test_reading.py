"""Configurations as they are written: files, arguments over them, and files that cannot be read."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli.reading import read_arguments, read_file

UNREADABLE = {
    "a: 1\nb:\n  c: 2\n  c: 3": "line 4 has the key 'b.c', which line 3 has already.",
    "a:\n  - {b: 1, b: 2}": "line 2 has the key 'a[0].b', which line 2 has already.",
    "a: &a [*a]": "line 1 has a part, 'a[0]', that contains itself.",
    "a: &a {b: {c: *a}}": "line 1 has a part, 'a.b.c', that contains itself.",
    "a: [0\nb: 1": "line 2, column 2 is not YAML (expected ',' or ']', but got ':').",
    "a:\n\tb": "line 2, column 1 is not YAML (found character '\\t' that cannot start any token).",
    "a: \0": "the file is not YAML (unacceptable character #x0000",
    "- " * 2000: "the file is not YAML (maximum recursion depth exceeded",
    "a: !!python/object:os.system {}": "line 1, column 4 is not YAML (could not determine a constructor",
    "? [a]\n: 1": "line 1 has a key that is not a word.",
    "": "the file must hold keys and values",
    "[1, 2]": "the file must hold keys and values",
    "word": "the file must hold keys and values",
    b"\xff\xfe\x80": "the file is not YAML ('utf-8' codec can't decode",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_with_the_line(text, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(MisconfigurationException) as error:
        read_arguments(["--config", str(path)])
    assert str(error.value).startswith(f"config is '{path}', but {UNREADABLE[text]}")
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path, reason in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(MisconfigurationException) as error:
            read_file(str(path))
        assert str(error.value) == f"config is '{path}', but the file cannot be read: {reason}."


def test_a_file_that_another_one_names_is_read_where_that_one_is(tmp_path):
    (tmp_path / "base.yaml").write_text("a: part.yaml\nb: {c: [part.yaml, none.yaml]}")
    (tmp_path / "part.yaml").write_text("{class_path: A, init_args: {d: 1, e: 2}}")
    base, part = ["--config", str(tmp_path / "base.yaml")], str(tmp_path / "part.yaml")
    assert read_arguments(base) == {"a": part, "b": {"c": [part, "none.yaml"]}}
    changed = {"class_path": "A", "init_args": {"d": 3, "e": 2}}
    assert read_arguments([*base, "--a.d=3"])["a"] == changed
    assert read_arguments([*base, "--config", "{a: {init_args: {d: 3}}}"])["a"] == changed
    with pytest.raises(MisconfigurationException, match=r"^model is '.*part.yaml', but line 1, column 2 is not YAML"):
        (tmp_path / "part.yaml").write_text("{")
        read_file(part, "model")


def test_what_is_below_a_list_is_about_its_last_item_and_an_option_has_its_own_value():
    given = read_arguments(["--l=[{a: 1}, {class_path: B, init_args: {c: 2}}]", "--l.c=3", "--empty", "--d=4"])
    assert given == {"l": [{"a": 1}, {"class_path": "B", "init_args": {"c": 3}}], "d": 4}


def test_many_aliases_of_aliases_take_no_time(tmp_path):
    lines = ["a0: &a0 {b: 1}", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]
    path = tmp_path / "many.yaml"
    path.write_text("\n".join(lines))
    assert read_file(str(path))["a1"] == [{"b": 1}] * 9


def test_later_files_and_arguments_are_over_earlier_ones(tmp_path):
    base, overlay = tmp_path / "base.yaml", tmp_path / "overlay.yaml"
    base.write_text("a: {class_path: A, init_args: {b: 1, c: 2}}\nd: {e: 1}\nl: [1]")
    overlay.write_text("a: {init_args: {c: 3}}\nd: {f: 2}")
    files = ["--config", str(base), f"--config={overlay}"]
    assert read_arguments(["fit", *files]) == {
        "a": {"class_path": "A", "init_args": {"b": 1, "c": 3}},
        "d": {"e": 1, "f": 2},
        "l": [1],
    }
    given = read_arguments(
        ["fit", *files, "--a.b=5", "--a.init_args.c", "null", "--d.e", "x", "--l+=2", "--print_config"]
    )
    assert given["a"]["init_args"] == {"b": 5, "c": None}
    assert given["d"] == {"e": "x", "f": 2}
    assert given["l"] == [1, 2]
    assert read_arguments([*files, "--a", "B", "--a.g", "1"])["a"] == {
        "class_path": "B",
        "init_args": {"b": 1, "c": 3, "g": 1},  # the parser drops what B does not accept
    }
