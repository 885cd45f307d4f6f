"""Tensors in files: what did not change is referred to, whatever it is called, and files do not pile up."""

import json

import pytest
import torch
from helpers.runs import assert_same
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

from fedmoe_pl.checkpoints.files import _AT_ONCE, _DTYPES, TensorFiles, read_tensors, same_bits, write_tensors


def read(folder, content):
    return json.loads(json.dumps(content), object_hook=TensorFiles(folder).read)


def test_a_tensor_is_written_once_and_another_bit_makes_another_tensor(tmp_path):
    files, a, nan = TensorFiles(tmp_path), torch.randn(50), torch.full((3,), torch.nan)
    tensors = {"a": a, "copy": a.clone(), "view": a[:2], "zero": torch.tensor(0.0)}
    written, used = files.write({"server": tensors, "rest": [1, None]}, [])
    assert used == {1} and {*load_file(tmp_path / "1.safetensors")} == {"server/a", "server/view", "server/zero"}
    assert_same(read(tmp_path, written), {"server": tensors, "rest": [1, None]})
    others = [a, torch.tensor(-0.0), a.double(), a.reshape(5, 10)]
    written, used = files.write({"other": others, "nan": [nan, nan.clone()]}, [])
    assert used == {1, 2}
    assert {*load_file(tmp_path / "2.safetensors")} == {"other/1", "other/2", "other/3", "nan/0"}
    again = read(tmp_path, written)
    assert_same(again["other"], others)
    assert str(again["other"][1]) == "tensor(-0.)" and again["nan"][0] is again["nan"][1]
    files.keep(used, [])
    assert files.write({"server": tensors}, [])[1] == {1}, "nothing is written again"


@pytest.mark.parametrize("is_a_copy", [False, True])
def test_a_tensor_that_was_changed_in_place_is_written_anew(is_a_copy, tmp_path):
    """Such as a table of clients, of which a hook sets a row."""
    files, table = TensorFiles(tmp_path), torch.zeros(100, 3)
    if is_a_copy:
        files.write({"other": table.clone()}, [])
    written = [files.write({"table": table}, [])[0]]
    for row in (70, 80):
        before = table.clone()
        table[row] = row
        written.append(files.write({"table": table}, [])[0])
        assert_same([read(tmp_path, each)["table"] for each in written[-2:]], [before, table])


def test_files_of_which_little_is_used_are_left_unless_they_stay(tmp_path):
    files, large = TensorFiles(tmp_path), {str(i): torch.randn(20_000) for i in range(4)}
    files.write(large, [])
    assert files.write({"0": large["0"]}, staying=[1])[1] == {1}
    some = {"0": large["0"], "1": large["1"], "2": large["2"]}
    assert files.write(some, [])[1] == {1}, "it is mostly used"
    written, used = files.write({"0": large["0"]}, [])
    assert used == {2}
    files.keep(used, [1])
    assert len([*tmp_path.iterdir()]) == 2, "the checkpoint before may need the other one"
    files.keep(used, [])
    assert [path.name for path in tmp_path.iterdir()] == ["2.safetensors"]
    assert_same(read(tmp_path, written), {"0": large["0"]})
    assert files.write({"1": large["1"]}, [])[1] == {3}


def test_nothing_is_remembered_of_tensors_that_are_gone(tmp_path):
    """Each round looks at all that is remembered."""
    files = TensorFiles(tmp_path)
    for round in range(4):
        files.keep(files.write({"server": torch.full((3,), round)}, [])[1], [])
    assert len(files._known) == 1


def test_a_type_without_a_name_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"no file has torch.complex128, as 'z' is\.$"):
        write_tensors(tmp_path / "1", {"z": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_library_reads_every_type_that_is_written(dtype, tmp_path):
    tensors = {
        "a": torch.tensor([[1, 0, 2]]).to(dtype),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3, dtype=dtype),
    }
    write_tensors(tmp_path / "of a view", {**tensors, "view": tensors["a"].expand(2, 3).T}, owner="it")
    found = load_file(tmp_path / "of a view")
    assert {name: same_bits(tensor, found[name]) for name, tensor in tensors.items()} == dict.fromkeys(tensors, True)
    assert found["view"].shape == (3, 2) and same_bits(found["view"], tensors["a"].expand(2, 3).T)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_tensors_that_are_written_in_pieces_are_read_whole(more, tmp_path):
    tensor = torch.randint(256, (2 * _AT_ONCE + more,), dtype=torch.uint8)
    write_tensors(tmp_path / "large", {"x": tensor})
    assert load_file(tmp_path / "large")["x"].equal(tensor) and read_tensors(tmp_path / "large")["x"].equal(tensor)
