"""LEAF's handwriting by writer, from files that the tests write."""

import json

from helpers.data import set_up

from fedmoe_pl.data import FEMNIST


def write_leaf(folder, **writers):
    """One of LEAF's files: of each writer the value of its images' pixels and their class."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(writers),
        "num_samples": [len(samples) for samples in writers.values()],
        "user_data": {
            writer: {"x": [[value] * 783 + [1.0] for value, _ in samples], "y": [label for _, label in samples]}
            for writer, samples in writers.items()
        },
    }
    (folder / f"all_data_{len(list(folder.iterdir()))}_niid.json").write_text(json.dumps(content))


def test_leaf_files_give_each_writer_its_images(tmp_path):
    write_leaf(tmp_path / "train", f0002_01=[(0.25, 61), (0.5, 3)], f0001_02=[(0.75, 10)])
    write_leaf(tmp_path / "train", f0000_03=[(0.125, 0)])
    write_leaf(tmp_path / "test", f0002_01=[(0.0, 3)], f0001_02=[(1.0, 10)], f0000_03=[(0.375, 5)])
    data = set_up(FEMNIST(root=str(tmp_path)))
    assert data.num_clients == 3 and data.num_classes == 62 and data.x.shape == (7, 1, 28, 28)
    held = [[(data.x[i, 0, 0, 0].item(), data.y[i].item()) for i in part] for part in data.train_samples]
    assert held == [[(0.125, 0)], [(0.75, 10)], [(0.25, 61), (0.5, 3)]]  # in the order of the writers' names
    held = [[(data.x[i, 0, 0, 0].item(), data.y[i].item()) for i in part] for part in data.test_samples]
    assert held == [[(0.375, 5)], [(1.0, 10)], [(0.0, 3)]]
    assert (data.x[:, 0, 27, 27] == 1).all()  # rows of pixels end where LEAF's do


def test_without_a_test_folder_each_writer_holds_out_a_share(tmp_path):
    write_leaf(tmp_path / "train", b=[(i / 8, 1) for i in range(5)], a=[(i / 16, 0) for i in range(10)])
    data = set_up(FEMNIST(root=str(tmp_path), pool=True, test_fraction=0.2))
    assert data.train_samples.sizes.tolist() == [8, 4] and data.test_samples.sizes.tolist() == [2, 1]
    assert data.y[data.global_test].tolist() in ([0, 0, 1], [1, 0, 0])
